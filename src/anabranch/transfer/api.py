"""The transfer contract: what one node promises another.

**Covers** naming a destination for pushed Layer Blocks (hand-off tickets) and a source for pulled blocks.
**Does not cover** how bytes travel (`transfer/live`) or which path to take (`policy/paths`).

Checksums: `layer_sum = xxh3_64(Layer Block)`; `block_sum = xxh3_64(concatenated little-endian layer_sums)`.
So a block can be verified layer by layer while it arrives, and once more as a whole for the price of 8 bytes a layer.
"""

from __future__ import annotations

import msgspec


class Address(msgspec.Struct, frozen=True):
    """Where a node listens for peers (control and bulk share the port)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A decode node's permission to push Layer Blocks into slots it has set aside.

    `handoff` names the transfer, `secret` proves that the sender was given this ticket, `blocks` is how many
    blocks (prompt block `first` … `first + blocks - 1`) are expected; each in `layers` Layer Blocks.
    A ticket is void once the hand-off completed, failed or passed `deadline_s` (seconds, relative, set by the issuer).
    """

    handoff: str
    secret: bytes
    address: Address
    first: int
    blocks: int
    layers: int
    deadline_s: float
