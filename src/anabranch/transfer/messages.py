"""Node ↔ node messages. Each frame that announces bulk bytes is followed by exactly those bytes, raw.

Fetch, on one connection:
    → FetchRequest          the keys of a run, in order
    ← FetchHeader           how many of them follow, with the checksum of each block
    ← LayerFrame + bytes    for each layer: that layer's Layer Block of every block, in order
    ← FetchEnd              the leases held until the last byte was sent, or they did not

Push (hand-off):
    → PushOpen              the ticket's name and secret
    ← PushAccepted | PushRefused
    → PushFrame + bytes     Layer Blocks of one layer, any subset, any order of layers
    → PushFinish
    ← PushResult
"""

from __future__ import annotations

from anabranch.core.messages import Message


class FetchRequest(Message, frozen=True, kw_only=True):
    """`tenant`: digest; `layout`: digest. `deadline_s`: how long the asker will wait."""

    keys: list[bytes]
    tenant: bytes
    layout: bytes
    deadline_s: float


class FetchHeader(Message, frozen=True, kw_only=True):
    """The first `count` of the keys follow. `reason` says why fewer than asked for, if known."""

    count: int
    reason: str = ""


class LayerFrame(Message, frozen=True, kw_only=True):
    """`sums[i]`: layer_sum of block i. len(sums) × layer_block_bytes raw bytes follow."""

    layer: int
    sums: list[int]


class FetchEnd(Message, frozen=True, kw_only=True):
    """`block_sums` as recorded at commit (0: not recorded). `lost`: blocks whose slot was reused while
    sending, or whose bytes are not the ones that were committed."""

    block_sums: list[int]
    lost: list[int] = []


class PushOpen(Message, frozen=True, kw_only=True):
    handoff: str
    secret: bytes
    layout: bytes


class PushAccepted(Message, frozen=True, kw_only=True): ...


class PushRefused(Message, frozen=True, kw_only=True):
    reason: str


class PushFrame(Message, frozen=True, kw_only=True):
    """`blocks[i]`: prompt block index, `sums[i]`: its layer_sum. len(blocks) × layer_block_bytes raw bytes follow."""

    layer: int
    blocks: list[int]
    sums: list[int]


class PushFinish(Message, frozen=True, kw_only=True): ...


class PushResult(Message, frozen=True, kw_only=True):
    """`reason` "" when every expected Layer Block arrived and verified."""

    reason: str = ""


class PushAborted(Message, frozen=True, kw_only=True):
    """The sender gives up."""

    reason: str


PeerRequest = FetchRequest | PushOpen
FetchReply = FetchHeader | LayerFrame | FetchEnd
PushData = PushFrame | PushFinish | PushAborted
PushReply = PushAccepted | PushRefused | PushResult
