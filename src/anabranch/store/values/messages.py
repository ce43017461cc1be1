"""Wire messages between a client (or another node) and a node, for values. Framing: `core.wire`. Rules of evolution:
`core.messages`.

A connection is a *lane*: one request after another, answers in order; requests may be sent before earlier answers have
arrived. A *session* is all lanes of one client: what it was granted on one lane it may use on the others. Raw bytes
follow a message where it says so, outside any frame. `names`: 32 bytes each, end to end. `sums`: the slice sums
(`store.values.slices`) of all items, end to end.

    Greeting →  ← Hello  Welcome | Denied →        every lane; nothing else is answered before
    small put   Put + bytes                                                  → Stored
    large put   Offer → Granted, then Slice + bytes on any lane, then Seal   → Stored (missing slices are sent again)
    small get   Get                                                          → Found + bytes
    large get   Get → Found (lease), then Read on any lane                   → 8 bytes of length, bytes; then Return
"""

from __future__ import annotations

from anabranch.core.messages import Message
from anabranch.store.messages import Stat, StatRequest

PROTOCOL = 1
INLINE_BYTES = 1 << 20
"""A get of at most this many bytes travels with its answer."""
STREAM_BYTES = 16 << 20
"""A put of at most this many bytes travels with its message."""
MAX_ITEMS = 65_536
"""Items of one request."""

# --- introduction -------------------------------------------------------------------------------------------------


class Greeting(Message, frozen=True, kw_only=True):
    """A node's first words. `authenticate`: it takes callers only with a proof (`core.authentication`)."""

    node_id: str
    nonce: bytes
    protocol: int = PROTOCOL
    authenticate: bool = False


class Hello(Message, frozen=True, kw_only=True):
    """`session`: 16 random bytes, equal on all lanes of a client. `proof` binds the greeting's nonce, `session` and
    `tenant` to a secret: the tenant's, or the cluster's (then the caller is trusted: any tenant, admin's calls,
    `scopes`). `traffic`: class of what this lane moves (`transfer.classes.TrafficClass`; 2: load)."""

    session: bytes
    nonce: bytes
    tenant: str = "default"
    namespace: str = "default"
    epoch: str = ""
    proof: bytes = b""
    protocol: int = PROTOCOL
    name: str = ""
    traffic: int = 2


class Welcome(Message, frozen=True, kw_only=True):
    """`proof`: the node knows the secret too. `salt`: the tenant's. `max_value_bytes`: what the node's memory holds for
    this caller at most, so the largest value, too; 0: it does not say. `local_address` (`unix:/path`), `arena_path`,
    `index_path`: where a trusted caller on this host finds the same node's memory; empty for others. `boot` names this
    boot of the host: equal boots, same host."""

    node_id: str
    salt: bytes
    trusted: bool
    proof: bytes = b""
    max_value_bytes: int = 0
    boot: str = ""
    local_address: str = ""
    arena_path: str = ""
    arena_inode: int = 0
    index_path: str = ""
    index_inode: int = 0


class Denied(Message, frozen=True, kw_only=True):
    """The lane closes. `code` as in `core.errors`."""

    reason: str
    code: str = "denied"


# --- put ----------------------------------------------------------------------------------------------------------


class Offer(Message, frozen=True, kw_only=True):
    """Values to store. `chain`: each is a block whose prefix is the one before it; `parent`: name of the one before the
    first. `replicas`: how many nodes shall hold it before the answer (0: what the namespace says). `durable`: on disk
    before the answer. `wait_s`: how long to wait for room. `scopes` (16 bytes each, trusted callers only): whose they
    are, if not the session's."""

    op: int
    names: bytes
    sizes: list[int]
    chain: bool = False
    parent: bytes = b""
    replicas: int = 0
    durable: bool = False
    wait_s: float = 1.0
    scopes: bytes = b""


class Put(Message, frozen=True, kw_only=True):
    """An Offer whose bytes follow at once, all of them, in order. `sums` empty: they come behind the bytes, as 8
    little-endian bytes each, so that the sender need not read its bytes before it sends them."""

    offer: Offer
    sums: list[int] = []


class Granted(Message, frozen=True, kw_only=True):
    """`outcomes[i]` (one byte each): SEND, or what became of item i already. `put` names the transfer. `present`: value
    sums (`slices.value_sum`) of the items that are PRESENT, in order: the node has seen only the size, the sender can
    tell whether its bytes are the same ones."""

    op: int
    put: int
    outcomes: bytes
    present: list[int] = []


class Slice(Message, frozen=True, kw_only=True):
    """Bytes of one slice follow; no answer."""

    put: int
    item: int
    slice: int
    sum: int


class Seal(Message, frozen=True, kw_only=True):
    """All slices were sent: commit what is complete. `sums`: of the items that were to be sent, in order."""

    op: int
    put: int
    sums: list[int]


class Stored(Message, frozen=True, kw_only=True):
    """`missing`: (item, slice) that did not arrive whole; the put stays open for them and another Seal. Empty: it is
    over. No `outcomes`: there is no such put any more, offer again."""

    op: int
    outcomes: bytes
    missing: list[tuple[int, int]] = []


class Abandon(Message, frozen=True, kw_only=True):
    """Forget an open put; no answer."""

    put: int


# --- get ----------------------------------------------------------------------------------------------------------


class Get(Message, frozen=True, kw_only=True):
    """`limit`: bytes that the caller takes inline (≤ INLINE_BYTES); 0: never. `views`: the caller maps the arena and
    wants places, not bytes. `run`: only the longest run of names from the first on."""

    op: int
    names: bytes
    limit: int = 0
    views: bool = False
    run: bool = False
    scopes: bytes = b""


class Found(Message, frozen=True, kw_only=True):
    """`outcomes[i]`: OK or why not. Of the OK items, in order: `sizes`, `sums`, `tiers` (index in TIERS), and `offsets`
    (in the arena) with `views`. `inline`: their bytes follow, end to end. `lease`: until `lease_s` from now, or Return,
    the bytes stay as they are and can be read; 0: no lease (nothing found, or inline: those are held until the lane's
    next message)."""

    op: int
    outcomes: bytes
    sizes: list[int] = []
    sums: list[int] = []
    offsets: list[int] = []
    tiers: bytes = b""
    inline: bool = False
    lease: int = 0
    lease_s: float = 0.0


class Read(Message, frozen=True, kw_only=True):
    """One slice of a leased item (index among the OK ones). Answer: length as 8 little-endian bytes, then the bytes;
    length 0: the lease is over."""

    lease: int
    item: int
    slice: int


class Return(Message, frozen=True, kw_only=True):
    """Give a lease back; no answer."""

    lease: int


class Damaged(Message, frozen=True, kw_only=True):
    """Items of a lease that arrived with a wrong sum twice: the node checks them and drops what is damaged. No
    answer."""

    lease: int
    items: list[int]


# --- everything else ------------------------------------------------------------------------------------------------


class Exists(Message, frozen=True, kw_only=True):
    """Does not protect anything from eviction. `run`: stop at the first that is not here. Without names it shows that
    everything sent before on this lane was taken."""

    op: int
    names: bytes
    run: bool = False


class Presence(Message, frozen=True, kw_only=True):
    """One byte an item: 0 not on this node, else 1 + index in TIERS."""

    op: int
    tiers: bytes


class Remove(Message, frozen=True, kw_only=True):
    """`everywhere`: on all nodes that the directory knows; else on this one. `ident`: how nodes call this removal among
    each other (`Missed`)."""

    op: int
    names: bytes
    everywhere: bool = True
    ident: bytes = b""


class Invalidate(Message, frozen=True, kw_only=True):
    """Drop every value of the session's tenant (`epoch` None), or of one epoch of it, in every tier; puts under way
    end STALE. A trusted caller may name another `tenant`. `everywhere`: on all nodes. `ident` as in Remove."""

    op: int
    tenant: str = ""
    epoch: str | None = None
    everywhere: bool = True
    ident: bytes = b""


class Pin(Message, frozen=True, kw_only=True):
    """Keep for `seconds` (0: pin no longer). A pin ends by itself, counts against the tenant's quota of pins, and never
    outlives `max_pin_s` of the node's settings."""

    op: int
    names: bytes
    seconds: float


class Prefetch(Message, frozen=True, kw_only=True):
    """Bring into this node's DRAM what is on its disk, on other nodes or in the backing store. Answered at once."""

    op: int
    names: bytes


class Done(Message, frozen=True, kw_only=True):
    """Answer to Remove, Pin, Prefetch (`outcomes`: one byte an item) and Invalidate (`outcomes` empty; `places`:
    "node/tier" → how many values went, or -1 where it could not be confirmed)."""

    op: int
    outcomes: bytes = b""
    places: dict[str, int] = {}


class Introduce(Message, frozen=True, kw_only=True):
    """Trusted callers, before `scopes` of others are first used on a lane: (tenant, namespace, epoch) of each, so that
    the values count against the right quota and go with the right invalidation. No answer."""

    scopes: list[tuple[str, str, str]]


class Trace(Message, frozen=True, kw_only=True):
    """What follows on this lane belongs to this trace: a W3C traceparent, empty for none. Only callers that trace send
    it. No answer."""

    context: str = ""


class Drain(Message, frozen=True, kw_only=True):
    """Trusted callers: take no new values, hand over what is worth it, leave when leases ended or `deadline_s`
    passed."""

    op: int
    deadline_s: float = 60.0


class Verify(Message, frozen=True, kw_only=True):
    """Trusted callers: read everything and check it. Answer: Done with places "tier/good" and "tier/damaged"."""

    op: int


class Listing(Message, frozen=True, kw_only=True):
    """Trusted callers: up to `limit` entries whose name is greater than `after`, in order of names."""

    op: int
    after: bytes = b""
    limit: int = 1000


class Entries(Message, frozen=True, kw_only=True):
    """`rows`: (name, size, scope, tier, uses). Shorter than `limit`: the end."""

    op: int
    rows: list[tuple[bytes, int, bytes, str, int]]


class Missed(Message, frozen=True, kw_only=True):
    """A node that was away, to each other one: what was removed and invalidated at `since` (seconds since 1970) or
    later?"""

    op: int
    since: float


class MissedReply(Message, frozen=True, kw_only=True):
    """`events`: as `store.values.missed.Event`, what the answering node was asked for or told of. `complete` False: it
    does not remember so long."""

    op: int
    events: list[tuple[float, bytes, bytes, str, str | None]]
    complete: bool = True


TIERS = ("dram", "ssd", "backing")

ClientToNode = (
    Hello
    | Offer
    | Put
    | Slice
    | Seal
    | Abandon
    | Get
    | Read
    | Return
    | Damaged
    | Exists
    | Remove
    | Invalidate
    | Pin
    | Prefetch
    | Introduce
    | Trace
    | Drain
    | Verify
    | Listing
    | Missed
    | StatRequest
)
NodeToClient = Greeting | Welcome | Denied | Granted | Stored | Found | Presence | Done | Entries | MissedReply | Stat
