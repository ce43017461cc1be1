"""What happens to a node (events) and what it wants done (actions). The driver is `store.live.node_server`.

Records of slots are not actions: the driver takes them from the node and writes them before it executes any action.
"""

from __future__ import annotations

import msgspec

from anabranch.core.messages import Message
from anabranch.store.messages import Holders, Resync
from anabranch.store.slots import Named
from anabranch.transfer.api import Ticket
from anabranch.transfer.records import AttachedSession, SlotRecord

# --- events -----------------------------------------------------------------------------------------------------


class Recovered(msgspec.Struct, frozen=True):
    """First event: what the arena held, and which sessions were attached to the former process."""

    records: dict[int, SlotRecord]
    sessions: list[AttachedSession]


class PortMessage(msgspec.Struct, frozen=True):
    session: bytes
    message: Message


class PortAttached(msgspec.Struct, frozen=True):
    """A port introduced itself on a new connection and its layout was accepted."""

    session: AttachedSession
    held: dict[int, int]


class PortLeft(msgspec.Struct, frozen=True):
    """The port's connection broke; its process may still be there and come back."""

    session: bytes


class SessionGone(msgspec.Struct, frozen=True):
    """The process behind the session does not exist any more, or the port detached."""

    session: bytes


class SegmentLayers(msgspec.Struct, frozen=True):
    """Layers 0 … layers-1 of all blocks of this part of a load are in place and verified."""

    load: int
    segment: int
    layers: int


class SegmentEnded(msgspec.Struct, frozen=True):
    """No more bytes of this part will be written. `sums[i]`: block_sum of block i if it is good, else None.
    `corrupt`: indices of blocks whose bytes were there but wrong."""

    load: int
    segment: int
    sums: list[int | None]
    reason: str = ""
    corrupt: list[int] = []


class SsdReleased(msgspec.Struct, frozen=True):
    """The reader is done with these SSD slots."""

    slots: list[int]


class Sealed(msgspec.Struct, frozen=True):
    """The checksum of a committed block. `conflict`: the resident block of the same name has other bytes."""

    slot: int
    key: bytes
    block_sum: int
    resident: int | None = None
    conflict: bool = False


class SsdWritten(msgspec.Struct, frozen=True):
    """`outcome`: "" written, "full" the file system has no space, anything else what went wrong. `real`: how many SSD
    slots have space behind them."""

    slot: int
    ssd_slot: int
    block: Named
    outcome: str = ""
    real: int = 0


class FetchAsked(msgspec.Struct, frozen=True):
    """A peer wants a run of blocks."""

    fetch: int
    keys: list[bytes]
    tenant: bytes
    deadline_s: float


class FetchServed(msgspec.Struct, frozen=True):
    """The serving thread is done with the blocks. `damaged`: slots whose bytes are not what was committed."""

    fetch: int
    lost: int = 0
    damaged: list[int] = []


class InboundDone(msgspec.Struct, frozen=True):
    """No more bytes will be written to the hand-off's slots."""

    handoff: str
    reason: str = ""


class OutboundDone(msgspec.Struct, frozen=True):
    """The sender is done with the hand-off's slots."""

    handoff: str
    reason: str = ""


class DirectoryUp(msgspec.Struct, frozen=True):
    """Connected, and joined."""


class DirectoryDown(msgspec.Struct, frozen=True): ...


class DirectoryMessage(msgspec.Struct, frozen=True):
    message: Holders | Resync


class Tick(msgspec.Struct, frozen=True): ...


NodeEvent = (
    Recovered
    | PortMessage
    | PortAttached
    | PortLeft
    | SessionGone
    | SegmentLayers
    | SegmentEnded
    | SsdReleased
    | Sealed
    | SsdWritten
    | FetchAsked
    | FetchServed
    | InboundDone
    | OutboundDone
    | DirectoryUp
    | DirectoryDown
    | DirectoryMessage
    | Tick
)

# --- actions ----------------------------------------------------------------------------------------------------


class Tell(msgspec.Struct, frozen=True):
    """Send to an engine port; a port that is not connected misses it (it will re-attach and ask again)."""

    session: bytes
    message: Message


class SaveSessions(msgspec.Struct, frozen=True):
    """Write the list to the arena's header: a successor must wait for these before it reuses their slots."""

    sessions: list[AttachedSession]


class SendDirectory(msgspec.Struct, frozen=True):
    message: Message


class ReadSsd(msgspec.Struct, frozen=True):
    """Read blocks into arena slots. `blocks[i]`: what must be in `ssd_slots[i]`."""

    load: int
    segment: int
    ssd_slots: list[int]
    blocks: list[Named]
    slots: list[int]


class FetchPeer(msgspec.Struct, frozen=True):
    load: int
    segment: int
    address: str
    keys: list[bytes]
    slots: list[int]
    tenant: bytes
    deadline_s: float


class StopSegment(msgspec.Struct, frozen=True):
    """Make sure that nothing more is written for it. SegmentEnded follows at once if it had not ended."""

    load: int
    segment: int


class Seal(msgspec.Struct, frozen=True):
    """Compute the checksum of a slot (pinned); with `resident`, compare it with that slot's (pinned too)."""

    slot: int
    key: bytes
    resident: int | None = None


class WriteSsd(msgspec.Struct, frozen=True):
    """Write a slot (pinned) to disk."""

    slot: int
    ssd_slot: int
    block: Named


class ServeFetch(msgspec.Struct, frozen=True):
    """Send these slots (pinned until FetchServed or the lease ends) to the peer."""

    fetch: int
    slots: list[int]
    generations: list[int]
    block_sums: list[int]
    reason: str = ""


class OpenSink(msgspec.Struct, frozen=True):
    """Accept pushes for a hand-off into `slots` (pinned until InboundDone)."""

    handoff: str
    secret: bytes
    slots: list[int]
    first: int


class CloseSink(msgspec.Struct, frozen=True):
    """Nothing more may be written for it; InboundDone(reason) follows at once if it had not ended."""

    handoff: str
    reason: str


class StartPush(msgspec.Struct, frozen=True):
    handoff: str
    ticket: Ticket


class Push(msgspec.Struct, frozen=True):
    handoff: str
    layer: int
    blocks: list[tuple[int, int]]


class EndPush(msgspec.Struct, frozen=True):
    """Nothing more will be pushed. `reason` not "": give up."""

    handoff: str
    reason: str = ""


NodeAction = (
    Tell
    | SaveSessions
    | SendDirectory
    | ReadSsd
    | FetchPeer
    | StopSegment
    | Seal
    | WriteSsd
    | ServeFetch
    | OpenSink
    | CloseSink
    | StartPush
    | Push
    | EndPush
)
