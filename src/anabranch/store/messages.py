"""Wire messages of the store. Rules of evolution: `core.messages`. Always batched: one message for a whole prefix.

    engine port ↔ node       Attach … the mirror of `engine.kv_port`, over a UNIX socket
    node ↔ directory         Join, Announce, Heartbeat, Lookup / Resync, Holders
    client → directory       Where, ListNodes / Places, NodeList
    directory → node         Repair
    anyone → node, directory StatRequest → Stat

Node ↔ node messages carry bulk bytes and live in `transfer.messages`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.blocks.layout import KvLayout
from anabranch.core.messages import Message
from anabranch.transfer.api import Ticket

Tier = Literal["dram", "ssd"]

# --- engine port → node -----------------------------------------------------------------------------------------


class Attach(Message, frozen=True, kw_only=True):
    """First message on every connection. `session` (16 random bytes) names this engine port for its whole life;
    `held` is {slot: references} that it believes to have, empty at first."""

    session: bytes
    layout: KvLayout
    held: dict[int, int] = {}


class Acquire(Message, frozen=True, kw_only=True):
    op: int
    keys: list[bytes]
    tenant: str
    load: bool
    deadline_s: float


class CancelLoad(Message, frozen=True, kw_only=True):
    op: int


class Reserve(Message, frozen=True, kw_only=True):
    op: int
    count: int


class Commit(Message, frozen=True, kw_only=True):
    """`blocks`: (slot, key, parent)."""

    blocks: list[tuple[int, bytes, bytes]]
    tenant: str


class Free(Message, frozen=True, kw_only=True):
    """One reference less per mention."""

    slots: list[int]


class OpenInbound(Message, frozen=True, kw_only=True):
    handoff: str
    slots: list[int]
    first: int
    deadline_s: float


class OpenOutbound(Message, frozen=True, kw_only=True):
    handoff: str
    ticket: Ticket


class PushLayer(Message, frozen=True, kw_only=True):
    """`blocks`: (slot, prompt block index)."""

    handoff: str
    layer: int
    blocks: list[tuple[int, int]]


class FinishOutbound(Message, frozen=True, kw_only=True):
    handoff: str


class Abandon(Message, frozen=True, kw_only=True):
    handoff: str


class Detach(Message, frozen=True, kw_only=True):
    """The engine port closes for good: every reference it has goes now."""


class StatRequest(Message, frozen=True, kw_only=True):
    """Valid on any connection, attached or not."""


# --- node → engine port -----------------------------------------------------------------------------------------


class Attached(Message, frozen=True, kw_only=True):
    """`lost`: held slots that the node cannot confirm; they are not the port's any more."""

    node_id: str
    arena_path: str
    arena_inode: int
    slots: int
    epoch: int
    lost: list[int] = []


class Refused(Message, frozen=True, kw_only=True):
    """The attach is impossible for good, e.g. another layout."""

    reason: str


class AcquiredReply(Message, frozen=True, kw_only=True):
    op: int
    ready: list[int]
    loading: list[int]


class LayersReadyReply(Message, frozen=True, kw_only=True):
    op: int
    layers: int


class LoadEndedReply(Message, frozen=True, kw_only=True):
    op: int
    usable: int
    tiers: list[str]
    reason: str = ""


class ReservedReply(Message, frozen=True, kw_only=True):
    op: int
    slots: list[int]


class InboundOpenedReply(Message, frozen=True, kw_only=True):
    handoff: str
    ticket: Ticket


class InboundEndedReply(Message, frozen=True, kw_only=True):
    handoff: str
    reason: str = ""


class OutboundEndedReply(Message, frozen=True, kw_only=True):
    handoff: str
    reason: str = ""


class Stat(Message, frozen=True, kw_only=True):
    """`census`: what is held right now; `counters`: what happened since the start."""

    name: str
    census: dict[str, int]
    counters: dict[str, float]
    state: dict[str, str] = {}


PortToNode = (
    Attach
    | Acquire
    | CancelLoad
    | Reserve
    | Commit
    | Free
    | OpenInbound
    | OpenOutbound
    | PushLayer
    | FinishOutbound
    | Abandon
    | Detach
    | StatRequest
)
NodeToPort = (
    Attached
    | Refused
    | AcquiredReply
    | LayersReadyReply
    | LoadEndedReply
    | ReservedReply
    | InboundOpenedReply
    | InboundEndedReply
    | OutboundEndedReply
    | Stat
)

# --- node → directory -------------------------------------------------------------------------------------------


class Join(Message, frozen=True, kw_only=True):
    """First message of a node. `epoch` names this life of the node; what an older epoch announced is forgotten.
    `address` is where peers fetch from, `layout` the digest of what it holds (empty: values). `replicas`: on how many
    nodes each of its values shall be, where an Announce says nothing else."""

    node_id: str
    epoch: int
    address: str
    layout: bytes
    replicas: int = 1


class Announce(Message, frozen=True, kw_only=True):
    """Changes since the previous `seq`. `reset`: forget everything of this node first. `last`: False while a reset is
    spread over several messages: until then the directory does not vouch for this node. What is removed counts before
    what is added. `added_names`, `removed_names`: the same, names of 32 bytes end to end. `wanted`: replica count →
    those of the added names that want another number of replicas than the node's other values."""

    seq: int
    added: dict[str, list[bytes]] = {}
    removed: dict[str, list[bytes]] = {}
    reset: bool = False
    last: bool = True
    added_names: dict[str, bytes] = {}
    removed_names: dict[str, bytes] = {}
    wanted: dict[int, bytes] = {}


class Heartbeat(Message, frozen=True, kw_only=True):
    """`seq` of the last Announce: a difference shows a lost one even when nothing changes any more. `free_bytes`,
    `total_bytes`: of its memory for values. `accepts` False: it takes no new values (it drains, or is broken)."""

    seq: int
    free_bytes: int = 0
    total_bytes: int = 0
    accepts: bool = True


class Lookup(Message, frozen=True, kw_only=True):
    """Who, other than the asker, holds a prefix of `keys` in blocks of this layout?"""

    op: int
    keys: list[bytes]
    layout: bytes


class Where(Message, frozen=True, kw_only=True):
    """Who holds these values? `names`: 32 bytes each, end to end. Answered on any connection, joined or not.
    `run`: only up to the first that nobody holds."""

    op: int
    names: bytes
    run: bool = False


class ListNodes(Message, frozen=True, kw_only=True):
    """Which nodes are there, and how full are they? Answered on any connection."""

    op: int


# --- directory → node -------------------------------------------------------------------------------------------


class Resync(Message, frozen=True, kw_only=True):
    """The directory missed something: announce everything again."""


class NameTaken(Message, frozen=True, kw_only=True):
    """Answer to a Join: another life of this node_id is there, at `address`, and is heard. Nothing is announced over
    this connection; the Join may be tried again."""

    address: str


class Holding(msgspec.Struct, frozen=True):
    """Node `node_id` holds keys `runs` = [(first, count, tier), …] of the ones asked for, in order."""

    node_id: str
    address: str
    runs: list[tuple[int, int, str]]


class Holders(Message, frozen=True, kw_only=True):
    """Answer to Lookup. `complete` False: some node has not finished announcing, so absence proves nothing."""

    op: int
    holdings: list[Holding]
    complete: bool = True


class Places(Message, frozen=True, kw_only=True):
    """Answer to Where. `places`: [names][4] little-endian uint16, 0 nothing, else 1 + (member << 3 | tier bits) with
    the bits dram 1, ssd 2, backing 4; a name's zeros come last; with `run` only as many names as come before the first
    that nobody holds. `members`: number → (node_id, address), at least those that occur. `unknown`: some node has not
    finished announcing, so absence proves nothing."""

    op: int
    places: bytes
    members: dict[int, tuple[str, str]] = {}
    unknown: bool = False


class Repair(Message, frozen=True, kw_only=True):
    """A node was lost. The receiver holds these values (at most REPAIR_NAMES) and should have node `target` at
    `address` store a copy of each; a hint, without answer. What it does not hold any more it skips."""

    names: bytes
    target: str
    address: str


class NodeRow(msgspec.Struct, frozen=True):
    """A node as its last heartbeat described it."""

    node_id: str
    address: str
    layout: bytes
    free_bytes: int
    total_bytes: int
    accepts: bool


class NodeList(Message, frozen=True, kw_only=True):
    """Answer to ListNodes: every node that is listened to. `unknown` as in Places."""

    op: int
    nodes: list[NodeRow]
    unknown: bool = False


REPAIR_NAMES = 1000
NodeToDirectory = Join | Announce | Heartbeat | Lookup | Where | ListNodes | StatRequest
DirectoryToNode = Resync | Holders | Places | Repair | NodeList | NameTaken | Stat
