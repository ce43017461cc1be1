"""The engine's view of its node: pages come from here, prefixes are found here, hand-offs leave from here.

Every call returns at once and never blocks on a peer; results come back as events through the sink given at
construction (called from the port's own thread; the engine puts them in its inbox).

Ownership: a slot that an event gives to the engine carries one reference, and the engine gives each reference back
with `free`. A slot given twice (two requests hit the same block) carries two. Committed slots stay readable in the
cache after the last `free`; uncommitted ones return to the free list. All references die with the engine process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from anabranch.blocks.layout import KvLayout
from anabranch.transfer.api import Ticket


class Filled(msgspec.Struct, frozen=True):
    """A slot whose block is completely written: publish it under `key`, child of `parent` (b"" for the first)."""

    slot: int
    key: bytes
    parent: bytes


# --- events -----------------------------------------------------------------------------------------------------


class Acquired(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `acquire`: `ready` slots hold the first blocks now; `loading` slots follow them without a gap and are
    being filled (LayersReady, then LoadEnded). Each slot carries one reference. Both may be empty: a miss."""

    op: int
    ready: list[int]
    loading: list[int]


class LayersReady(msgspec.Struct, frozen=True, kw_only=True):
    """Layers 0 … layers-1 of all loading blocks are in place and verified."""

    op: int
    layers: int


class LoadEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The load is over. The first `usable` of `loading` are good, in all layers; the rest must not be read.
    `tiers[i]` says where usable block i came from: "ssd" or "peer". `reason` is "" or why it fell short."""

    op: int
    usable: int
    tiers: list[str]
    reason: str = ""


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `reserve`: exactly the number asked for, or none ([]) when the node cannot make room now."""

    op: int
    slots: list[int]


class InboundOpened(msgspec.Struct, frozen=True, kw_only=True):
    handoff: str
    ticket: Ticket


class InboundEnded(msgspec.Struct, frozen=True, kw_only=True):
    """All Layer Blocks arrived and verified (`reason` ""), or the hand-off failed."""

    handoff: str
    reason: str = ""


class OutboundEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Everything pushed was accepted by the peer (`reason` ""), or the hand-off failed."""

    handoff: str
    reason: str = ""


class PortLost(msgspec.Struct, frozen=True):
    """The node is gone; held slots stay mapped and valid. Outstanding acquires, loads and hand-offs have ended (as
    misses/failures, by events sent before this one). Reserve requests wait for PortBack."""

    reason: str


class PortBack(msgspec.Struct, frozen=True):
    """The node is back and has confirmed every slot in use. `lost` slots were not confirmed: somebody else may have
    them now, so what depends on them is recomputed. Giving them back with `free` changes nothing."""

    lost: list[int] = []


PortEvent = (
    Acquired | LayersReady | LoadEnded | Reserved | InboundOpened | InboundEnded | OutboundEnded | PortLost | PortBack
)


class KvPort(Protocol):
    layout: KvLayout
    total_slots: int

    @property
    def memory(self) -> memoryview:
        """Writable `[total_slots][Full Block]` shared with the node."""

    def acquire(self, op: int, keys: Sequence[bytes], *, tenant: str, load: bool, deadline_s: float) -> None:
        """Find the longest readable prefix of `keys`: first in the arena, then (if `load`) from SSD and other nodes."""

    def cancel_load(self, op: int) -> None:
        """Stop a load. LoadEnded still comes (soon); until then its slots may still be written to."""

    def reserve(self, op: int, count: int) -> None: ...

    def commit(self, blocks: Sequence[Filled], *, tenant: str) -> None:
        """Publish. Never answered; a duplicate or a refused block simply stays private to the engine."""

    def free(self, slots: Sequence[int]) -> None: ...

    def open_inbound(self, handoff: str, slots: Sequence[int], *, first: int, deadline_s: float) -> None:
        """Let a peer push prompt blocks `first`… into `slots`, in order."""

    def open_outbound(self, handoff: str, ticket: Ticket) -> None: ...

    def push_layer(self, handoff: str, layer: int, blocks: Sequence[tuple[int, int]]) -> None:
        """Send Layer Block `layer` of each (slot, prompt block index); slots stay referenced until OutboundEnded."""

    def finish_outbound(self, handoff: str) -> None:
        """Everything has been pushed; OutboundEnded follows."""

    def abandon(self, handoff: str) -> None:
        """Drop a hand-off in either direction. InboundEnded/OutboundEnded(reason="abandoned") still comes; until then
        its slots may still be in use by the transfer."""

    def close(self) -> None: ...
