"""Values on their way into a shelf: each item of a batch by itself, until it is stored, refused or given up.

An item has an extent of its own from the offer on. Whoever fills it says so before (`begin_slice`) and after; an
abandoned item's extent is free only when nobody writes into it any more. Two writers of one name both write; the first
to finish has stored it, the other learns that its bytes are the same (PRESENT) or not (DIFFERS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.core.errors import WireError
from anabranch.paging.extents import rounded
from anabranch.store.leases import Leases
from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.lineage import Lineage
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES
from anabranch.store.values.shelf import Shelf
from anabranch.store.values.slices import SLICE_BYTES, slice_count

PUT_IDLE_S = 30.0
"""A put of which nothing arrives for so long is abandoned."""

PLACED_AT_ONCE = 128
"""Items of a large batch that find their place before others get the lock."""

SEND, OK, PRESENT, DIFFERS = Outcome.SEND, Outcome.OK, Outcome.PRESENT, Outcome.DIFFERS
FULL, TOO_BIG, STALE = Outcome.FULL, Outcome.TOO_BIG, Outcome.STALE


class Item:
    """`sums`: of the slices that arrived whole, None for the others. `writing`: slices that somebody receives now.
    `before`: the item of the same chain that it is built on."""

    __slots__ = (
        "anchor",
        "before",
        "era",
        "missing",
        "name",
        "outcome",
        "parent",
        "scope",
        "size",
        "start",
        "sums",
        "writing",
    )

    def __init__(self, name: bytes, scope: ScopeState, size: int, parent: bytes) -> None:
        self.name = name
        self.scope = scope
        self.era = scope.era
        self.size = size
        self.parent = parent
        self.anchor: Entry | None = None
        self.before: Item | None = None
        self.start = -1
        self.sums: list[int | None] = []
        self.missing = 0
        self.writing: set[int] = set()
        self.outcome = FULL


class Put:
    """`number` 0: its bytes come at once, it is not open to others. `tried`: how many of its items were placed, or not,
    in the round under way."""

    __slots__ = ("durable", "granted", "items", "number", "over", "replicas", "session", "tried", "unfinished")

    def __init__(self, session: object, items: list[Item], *, durable: bool, replicas: int) -> None:
        self.number = 0
        self.session = session
        self.items = items
        self.granted: list[int] = []
        self.durable = durable
        self.replicas = replicas
        self.over = False
        self.tried = 0
        self.unfinished = False

    @property
    def outcomes(self) -> bytes:
        return bytes([item.outcome for item in self.items])


class Puts:
    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lineage = Lineage(shelf)
        self._open: dict[int, Put] = {}
        self._ends: Leases[int] = Leases()
        self._next = 0
        self.closing = False
        """Take no new values (the node drains)."""
        self.below: Callable[[ScopeState, bytes], tuple[int, Record] | None] | None = None
        """Looks a value up in the tiers below DRAM, in memory."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        session: object,
        scopes: ScopeState | Sequence[ScopeState],
        names: bytes,
        sizes: Sequence[int],
        *,
        chain: bool = False,
        parent: bytes = b"",
        durable: bool = False,
        replicas: int = 0,
    ) -> Put:
        """A new put with a place for each item that has one now; the others are FULL and may be placed later. Raises
        WireError if names and sizes do not belong together."""
        if len(names) != len(sizes) * NAME_BYTES or (parent and len(parent) != NAME_BYTES):
            raise WireError(f"{len(sizes)} sizes and {len(names)} bytes of names")
        items: list[Item] = []
        for i, size in enumerate(sizes):
            if size < 0:
                raise WireError(f"size of item {i} is {size}")
            name = names[i * NAME_BYTES : (i + 1) * NAME_BYTES]
            scope = scopes if isinstance(scopes, ScopeState) else scopes[i]
            item = Item(name, scope, size, parent)
            if chain:
                parent = name
                item.before = items[-1] if items else None
            items.append(item)
        put = Put(session, items, durable=durable, replicas=replicas)
        self.place(put)
        return put

    def place(self, put: Put) -> bool:
        """Find room for the items that are FULL; True if none is left. `put.unfinished`: it stopped early, call again
        (after letting others have the lock)."""
        items, at = put.items, put.tried % max(1, len(put.items))
        stop = min(at + PLACED_AT_ONCE, len(items))
        put.unfinished = True
        while at < stop:
            item = items[at]
            if item.outcome is FULL:
                item.outcome = self._placed(item)
                if item.outcome is FULL and self._shelf.unfinished:
                    put.tried = at
                    return False
            at += 1
        put.tried = at
        put.unfinished = at < len(items)
        return not put.unfinished and all(item.outcome is not FULL for item in items)

    def open(self, put: Put, now: float) -> int:
        """The sender gets a number, under which slices and seal will come; 0 if there is nothing to send."""
        put.granted = [i for i, item in enumerate(put.items) if item.outcome is SEND]
        if put.granted:
            self._next += 1
            put.number = self._next
            self._open[put.number] = put
            self._ends.grant(put.number, now + PUT_IDLE_S)
        return put.number

    def begin_slice(self, session: object, number: int, index: int, slice_: int, now: float) -> tuple[int, int] | None:
        """Where the slice belongs, (start, length): nobody else uses these bytes until `end_slice`. None: it is not
        wanted. Raises WireError for a slice that the item does not have."""
        put = self._open.get(number)
        if put is None or put.session is not session:
            return None
        if not 0 <= index < len(put.items) or not 0 <= slice_ < slice_count(put.items[index].size):
            raise WireError(f"put {number} has no slice {slice_} of item {index}")
        item = put.items[index]
        if item.outcome is not SEND or slice_ in item.writing:
            return None
        if item.sums[slice_] is not None:
            item.sums[slice_] = None
            item.missing += 1
        item.writing.add(slice_)
        self._ends.extend(number, now + PUT_IDLE_S)
        at = slice_ * SLICE_BYTES
        return item.start + at, min(SLICE_BYTES, item.size - at)

    def end_slice(self, put: Put, index: int, slice_: int, sum_: int | None) -> None:
        """`sum_`: of the bytes that lie there now, None if they are not what the sender meant."""
        item = put.items[index]
        item.writing.discard(slice_)
        if sum_ is not None:
            item.sums[slice_] = sum_
            item.missing -= 1
        if put.over and not item.writing:
            self._give_back(item)

    def slice_bytes(self, put: Put, index: int, slice_: int) -> int:
        return min(SLICE_BYTES, put.items[index].size - slice_ * SLICE_BYTES)

    def in_its_own_way(self, put: Put) -> bool:
        """What does not fit would if the put's other items, and what they are built on, were not there: to wait for
        others does not help."""
        shelf = self._shelf
        own = sum(rounded(item.size) for item in put.items if item.outcome is SEND)
        full = [item for item in put.items if item.outcome is FULL]
        wanted = min((rounded(item.size) for item in full), default=0)
        if own > 0 and wanted <= shelf.evictable_bytes + own:
            return True
        first = next((item for item in full if item.parent), None)
        if first is None:
            return False
        while first.parent not in first.scope.entries and first.before is not None:
            first = first.before
        room = min(shelf.capacity, first.scope.tenant.quota_bytes or shelf.capacity) - own - wanted
        return self._lineage.bytes_above(first.scope, first.parent, max(0, room)) > room

    def get(self, session: object, number: int) -> Put | None:
        put = self._open.get(number)
        return put if put is not None and put.session is session else None

    def arrived(self, item: Item, sums: list[int]) -> None:
        """All bytes of an inline item are in place and have these sums."""
        item.sums[:] = sums
        item.missing = 0

    def seal(self, put: Put, sums: Sequence[int], now: float) -> tuple[list[tuple[int, int]], list[Entry]]:
        """Store what is complete. `sums`: of all items that were granted, or of those still open. Returns the missing
        slices and the new entries, which have a reference each (`settle` ends it). Raises WireError."""
        indices = [i for i in put.granted if put.items[i].outcome is SEND]
        if len(sums) != sum(slice_count(put.items[i].size) for i in indices):
            indices = put.granted
        if len(sums) != sum(slice_count(put.items[i].size) for i in indices):
            raise WireError(f"put {put.number}: {len(sums)} sums do not belong to its items")
        missing: list[tuple[int, int]] = []
        entries: list[Entry] = []
        at = 0
        for i in indices:
            item = put.items[i]
            count = len(item.sums) if item.outcome is SEND else slice_count(item.size)
            claimed = sums[at : at + count]
            at += count
            if item.outcome is not SEND:
                continue
            wrong = [(i, s) for s in range(count) if item.sums[s] is None or item.sums[s] != claimed[s]]
            if wrong:
                missing += wrong
                continue
            entry = self.commit(item, tuple(claimed))
            if entry is not None:
                entries.append(entry)
        if missing:
            self._ends.extend(put.number, now + PUT_IDLE_S)
        else:
            self._forget(put)
        return missing, entries

    def commit(self, item: Item, sums: tuple[int, ...]) -> Entry | None:
        """Name an item whose bytes are all there. None: refused, its outcome says why."""
        shelf, scope = self._shelf, item.scope
        if item.era != scope.era:
            self._refuse(item, STALE)
            return None
        known = scope.entries.get(item.name)
        if known is not None:
            same = known.size == item.size and known.sums == sums
            self._refuse(item, PRESENT if same else DIFFERS)
            return None
        if shelf.taken(scope, item.name):
            self._refuse(item, Outcome.DENIED)
            return None
        item.outcome = OK
        shelf.counters["put_bytes"] += item.size
        entry = shelf.commit(scope, item.name, item.size, sums, item.parent, item.start)
        self._lineage.arrived(entry, item)
        return entry

    def compare(self, item: Item, sums: tuple[int, ...]) -> None:
        """An inline item whose name was there: now that its sums are known, is it the same?"""
        known = self.sums_of(item)
        if item.outcome is PRESENT and known is not None and sums != known:
            item.outcome = DIFFERS

    def sums_of(self, item: Item) -> tuple[int, ...] | None:
        """Of the value that is stored under the item's name."""
        entry = item.scope.entries.get(item.name)
        if entry is not None:
            return entry.sums
        located = self.below(item.scope, item.name) if self.below is not None else None
        return located[1].sums if located is not None else None

    def settle(self, entries: list[Entry]) -> None:
        """End the references of new entries, children first."""
        for entry in reversed(entries):
            self._shelf.release(entry)
            self._lineage.settled(entry)

    def abandon(self, put: Put) -> None:
        """Its extents are free as soon as nobody writes into them; nothing of it is ever found."""
        if put.over:
            return
        self._forget(put)
        put.over = True
        for item in put.items:
            if item.outcome is SEND and not item.writing:
                self._give_back(item)

    def refuse(self, item: Item, outcome: Outcome) -> None:
        """Give an inline item up."""
        if item.outcome is SEND:
            self._refuse(item, outcome)
        else:
            item.outcome = outcome

    def end_session(self, session: object) -> None:
        for put in [put for put in self._open.values() if put.session is session]:
            self.abandon(put)
            self._shelf.counters["puts_abandoned"] += 1

    def expire(self, now: float) -> list[Put]:
        """Puts that were given up because nothing came; their senders may be stuck in the middle of a slice."""
        over = [self._open[number] for number in self._ends.expired(now) if number in self._open]
        for put in over:
            self.abandon(put)
            self._shelf.counters["puts_abandoned"] += 1
        return over

    def _placed(self, item: Item) -> Outcome:
        shelf, scope, tenant = self._shelf, item.scope, item.scope.tenant
        known = scope.entries.get(item.name)
        if known is not None:
            shelf.touch(known)
            return PRESENT if known.size == item.size else DIFFERS
        located = self.below(scope, item.name) if self.below is not None else None
        if located is not None:
            return PRESENT if located[1].size == item.size else DIFFERS
        if self.closing:
            return Outcome.UNREACHABLE
        if shelf.taken(scope, item.name):
            return Outcome.DENIED
        if item.size > shelf.capacity or (tenant.quota_bytes and item.size > tenant.quota_bytes):
            return TOO_BIG
        if item.before is not None and item.before.outcome is FULL:
            self._lineage.full(item.name, item)
            return FULL
        self._lineage.begin(item)
        start = shelf.reserve(tenant, item.size)
        if start is None:
            if not shelf.unfinished:
                self._lineage.full(item.name, item)
            return FULL
        item.start = start
        count = slice_count(item.size)
        item.sums = [None] * count
        item.missing = count
        return SEND

    def _refuse(self, item: Item, outcome: Outcome) -> None:
        self._shelf.unreserve(item.scope.tenant, item.start, item.size)
        self._lineage.end(item)
        item.outcome = outcome

    def _give_back(self, item: Item) -> None:
        if item.outcome is SEND:
            self._refuse(item, STALE)

    def _forget(self, put: Put) -> None:
        if self._open.pop(put.number, None) is not None:
            self._ends.end(put.number)
