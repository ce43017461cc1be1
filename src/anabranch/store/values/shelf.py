"""A node's DRAM: which values lie where, who uses them, what goes to make room.

Pure and single-threaded: the owner calls it under one lock and says what time it is. Names, the order of eviction and
children-before-parents are `paging.prefix_tree`'s and `policy.eviction`'s, bytes are `paging.extents`'s.

**Covers** residency, references, eviction, quotas, invalidation. **See also** `puts`, `reads`, `pins`: who comes and
asks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.paging.extents import Extents, rounded
from anabranch.paging.prefix_tree import PrefixTree
from anabranch.policy.eviction.contract import EvictionPolicy
from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry, ScopeState, Tenant
from anabranch.store.values.scopes import Scopes

TOUCHES_REMEMBERED = 512
"""Reads whose recency waits for the next eviction; beyond it a read in a row of reads is forgotten."""


FRESH_REMEMBERED = 1 << 15
"""New values that eviction has yet to hear of: in a burst of puts it hears of them afterwards."""
FRESH_AT_ONCE = 256
EVICTED_AT_ONCE = 64
"""Values that one call evicts: whoever needs more room calls again, and lets others in between."""


class Mirror(Protocol):
    """What others see of the shelf, kept in step with it: the shared index, the records of a warm restart."""

    def put(self, entry: Entry) -> None: ...
    def discard(self, entry: Entry) -> None: ...
    def move(self, source: int, target: int, size: int) -> None:
        """Copy a value inside the arena (the ranges do not overlap)."""
        ...


class NoMirror:
    def put(self, entry: Entry) -> None: ...
    def discard(self, entry: Entry) -> None: ...
    def move(self, source: int, target: int, size: int) -> None: ...


class Shelf:
    """`first_generation`: above all that were ever used with this arena. `leaving(entry)` is called for a value that is
    evicted, while its bytes are still there; `unpin` ends the pin of one that is dropped."""

    def __init__(
        self,
        arena_bytes: int,
        policy: EvictionPolicy,
        *,
        max_entries: int,
        first_generation: int = 1,
        mirror: Mirror | None = None,
        extents: Extents | None = None,
    ) -> None:
        self.scopes = Scopes()
        self.counters: Counter[str] = Counter()
        self.changed: dict[bytes, bool] | None = None
        self.wanted: dict[bytes, int] = {}
        """Names that want another number of replicas than the node's other values."""
        self.leaving: Callable[[Entry], None] | None = None
        self.unpin: Callable[[Entry], None] | None = None
        self.unfinished = False
        """The last `reserve` found no room yet, and more calls will find some."""
        self.room_made = 0
        """Grows whenever something in the way of a put went."""
        self._extents = extents or Extents(arena_bytes)
        self._tree = PrefixTree(policy)
        self._mirror = mirror or NoMirror()
        self._max_entries = max_entries
        self._slots: list[Entry | None] = []
        self._free_slots: list[int] = []
        self._generation = first_generation - 1
        self._touched: dict[bytes, Entry] = {}
        self._fresh: deque[Entry] = deque()
        self._starts: dict[int, Entry] = {}
        self._ends: dict[int, Entry] = {}
        self._held_bytes = 0
        self._reserved_bytes = 0
        self._last_size = 0
        self._gone = 0

    @property
    def capacity(self) -> int:
        """Bytes of the largest value that can ever fit."""
        return self._extents.size & -4096 or self._extents.size

    @property
    def generation(self) -> int:
        """The latest one that was given."""
        return self._generation

    @property
    def free_bytes(self) -> int:
        return self._extents.free

    @property
    def used_bytes(self) -> int:
        return self._extents.size - self._extents.free

    @property
    def reserved_bytes(self) -> int:
        """Of values on their way in."""
        return self._reserved_bytes

    @property
    def held_bytes(self) -> int:
        """Of values that somebody uses."""
        return self._held_bytes

    @property
    def evictable_bytes(self) -> int:
        """Free, or used by nobody. At most: an unused value stays while others that are built on it are used."""
        return self._extents.size - self._reserved_bytes - self._held_bytes

    def __len__(self) -> int:
        """Values, those included that have lost their name and are still in use."""
        return len(self._slots) - len(self._free_slots)

    # --- references -----------------------------------------------------------------------------------------------

    def touch(self, entry: Entry) -> None:
        """It was asked for. Eviction learns of it before it next chooses."""
        entry.uses += 1
        touched = self._touched
        if len(touched) < TOUCHES_REMEMBERED:
            touched[entry.name] = entry
        tenant = entry.scope.tenant
        if tenant.quota_bytes:
            tenant.order.move_to_end(entry.name)

    def hold(self, entry: Entry) -> None:
        """The bytes stay until `release`."""
        entry.refs += 1
        if entry.refs == 1:
            self._held_bytes += rounded(entry.size)
            if entry.listed:
                self._tree.hold(entry.name)

    def release(self, entry: Entry) -> None:
        if entry.refs < 1:
            raise InvariantBroken(f"value {entry.name.hex()} was released more often than held")
        entry.refs -= 1
        if entry.refs:
            return
        self._held_bytes -= rounded(entry.size)
        self.room_made += 1
        if entry.listed:
            self._tree.release(entry.name)
        elif entry.removed:
            self._free(entry)
        elif not entry.live:
            self.drop(entry)
        elif entry.parent or entry.scope.tenant.quota_bytes:
            # Its parent must not go before it; and a quota looks for values that eviction knows.
            self._list(entry)
        elif not entry.fresh:
            entry.fresh = entry.uses + 1
            self._fresh.append(entry)
            if len(self._fresh) > FRESH_REMEMBERED:
                self.list_fresh(2)

    def list_fresh(self, count: int) -> None:
        """Tell eviction of up to `count` values that are new, those that were read meanwhile last."""
        fresh = self._fresh
        while fresh and count > 0:
            entry = fresh.popleft()
            count -= 1
            if not entry.fresh or entry.refs or not entry.live:
                entry.fresh = 0
            elif entry.fresh != entry.uses + 1:
                entry.fresh = entry.uses + 1
                fresh.append(entry)
            else:
                self._list(entry)
                if entry.uses:
                    self._tree.reuse(entry.name)

    def _list(self, entry: Entry) -> None:
        """A value is unused: from now on eviction knows it."""
        entry.listed = True
        entry.fresh = 0
        try:
            self._tree.insert(entry.name, entry.parent, entry.slot, held=False)
        except InvalidInput:
            # A ring of parents: the value is as good without one.
            entry.parent = b""
            self._tree.insert(entry.name, b"", entry.slot, held=False)

    def set_quota(self, tenant: Tenant, quota_bytes: int, pin_quota_bytes: int) -> None:
        if quota_bytes and not tenant.quota_bytes:
            for state in self.scopes.states():
                if state.tenant is tenant:
                    tenant.order.update(state.entries)
                    for entry in state.entries.values():
                        if entry.fresh and not entry.refs:
                            self._list(entry)
        tenant.quota_bytes, tenant.pin_quota_bytes = quota_bytes, pin_quota_bytes

    # --- room -----------------------------------------------------------------------------------------------------

    def reserve(self, tenant: Tenant, size: int) -> int | None:
        """Start of an extent for a new value, evicting as needed (first the tenant's own values if its quota is in the
        way); None if what is in the way is in use, or (`unfinished`) was too much to evict in one call."""
        need = rounded(size)
        self.unfinished = False
        if tenant.quota_bytes and tenant.used_bytes + need > tenant.quota_bytes and not self._shrink(tenant, need):
            return None
        start = self._extents.take(size)
        if start is None:
            start = self._make_room(size, need)
        if start is not None:
            tenant.used_bytes += need
            self._reserved_bytes += need
        return start

    def unreserve(self, tenant: Tenant, start: int, size: int) -> None:
        """Give back what `reserve` gave and `commit` did not take."""
        self._extents.give(start, size)
        tenant.used_bytes -= rounded(size)
        self._reserved_bytes -= rounded(size)
        self.room_made += 1

    def settle(self) -> None:
        """Let eviction know of the reads so far."""
        touched, self._touched = self._touched, {}
        tree = self._tree
        for name, entry in touched.items():
            if not entry.listed:
                continue
            if entry.refs:
                tree.reuse(name)
            else:
                tree.hold(name)
                tree.reuse(name)
                tree.release(name)

    def _make_room(self, size: int, need: int) -> int | None:
        if need > self.evictable_bytes:
            return None
        self.list_fresh(FRESH_AT_ONCE)
        self.settle()
        gone = self._gone
        for _ in range(EVICTED_AT_ONCE):
            if not self._evict():
                self._gone = 0
                return None
            gone += self._last_size
            start = self._extents.take(size)
            if start is None and gone >= 2 * need:
                start = self._clear(size, need)
                gone = need
            if start is not None:
                self._gone = 0
                return start
        self._gone = gone
        self.unfinished = True
        return None

    def _evict(self) -> bool:
        while not self._tree.evictable:
            if not self._fresh:
                return False
            self.list_fresh(FRESH_AT_ONCE)
        slot, _, _ = self._tree.pop_victim()
        entry = self._entry(slot)
        entry.listed = False
        self._evicted(entry)
        return True

    def _evicted(self, entry: Entry) -> None:
        if self.leaving is not None and entry.live:
            self.leaving(entry)
        self._last_size = rounded(entry.size)
        self._unname(entry)
        self._free(entry)
        self.counters["evicted"] += 1
        self.counters["evicted_bytes"] += entry.size

    def _shrink(self, tenant: Tenant, need: int) -> bool:
        """Evict the tenant's least recently used values until `need` more bytes fit its quota."""
        self.settle()
        order = tenant.order
        tries = 2 * len(order)
        evicted = 0
        while tenant.used_bytes + need > tenant.quota_bytes and tries > 0:
            if evicted == EVICTED_AT_ONCE:
                self.unfinished = True
                return False
            tries -= 1
            name, entry = next(iter(order.items()))
            if self._tree.evict(name):
                entry.listed = False
                self._evicted(entry)
                evicted += 1
                self.counters["evicted_for_quota"] += 1
            else:
                # In use, or others are built on it: those come later in the order now.
                order.move_to_end(name)
            if not order:
                break
        return tenant.used_bytes + need <= tenant.quota_bytes

    def _clear(self, size: int, need: int) -> int | None:
        """Free bytes suffice but lie apart: widen a hole by moving unused neighbours into other holes."""
        for low, high in list(self._extents.holes())[:4]:
            hole = low, high
            while hole[1] - hole[0] < need + 4096:
                wider = self._widen(*hole)
                if wider is None:
                    break
                hole = wider
                start = self._extents.take(size)
                if start is not None:
                    return start
        return None

    def _widen(self, low: int, high: int) -> tuple[int, int] | None:
        for entry in (self._ends.get(low), self._starts.get(high)):
            if entry is None or entry.refs or entry.removed or rounded(entry.size) > high - low:
                continue
            was = entry.offset
            target = self._elsewhere(entry, low, high)
            if target is None:
                continue
            self._mirror.discard(entry)
            self._mirror.move(was, target, entry.size)
            self._place(entry, target)
            self._mirror.put(entry)
            self._extents.give(was, entry.size)
            self.counters["moved"] += 1
            return min(low, was), max(high, was + rounded(entry.size))
        return None

    def _elsewhere(self, entry: Entry, low: int, high: int) -> int | None:
        """Room for a copy outside low … high."""
        refused: list[int] = []
        target = self._extents.take(entry.size)
        while target is not None and low <= target < high and len(refused) < 8:
            refused.append(target)
            target = self._extents.take(entry.size)
        for start in refused:
            self._extents.give(start, entry.size)
        if target is not None and low <= target < high:
            self._extents.give(target, entry.size)
            return None
        return target

    # --- names ----------------------------------------------------------------------------------------------------

    def commit(
        self, scope: ScopeState, name: bytes, size: int, sums: tuple[int, ...], parent: bytes, start: int
    ) -> Entry:
        """Name what was reserved; the caller has made sure that the name is free in its scope. The entry has one
        reference, the caller's."""
        for dead in self.scopes.reclaim:
            former = dead.pop(name, None)
            if former is not None and self._slots[former.slot] is former:
                self.drop(former)
        entry = self._new(scope, name, size, sums, parent, start)
        if scope.tenant.quota_bytes:
            scope.tenant.order[name] = entry
        self._mirror.put(entry)
        if self.changed is not None:
            self.changed[name] = True
        return entry

    def _new(
        self, scope: ScopeState, name: bytes, size: int, sums: tuple[int, ...], parent: bytes, start: int
    ) -> Entry:
        slots = self._slots
        # A bound on memory, not a promise: if all entries are in use there are more of them.
        while not self._free_slots and len(slots) >= self._max_entries and self._evict():
            pass
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(slots)
            slots.append(None)
        self._generation += 1
        entry = Entry(name, scope, size, sums, parent, start, self._generation, slot)
        entry.refs = 1
        length = rounded(size)
        self._held_bytes += length
        self._reserved_bytes -= length
        slots[slot] = entry
        scope.entries[name] = entry
        self._starts[start] = entry
        self._ends[start + length] = entry
        return entry

    def adopt(self, record: Record, start: int) -> Entry:
        """A value of a former life, whose extent the arena was made around; one reference, as after `commit`."""
        scope = self.scopes.known(record.scope)
        length = rounded(record.size)
        self._reserved_bytes += length
        scope.tenant.used_bytes += length
        return self.commit(scope, record.name, record.size, record.sums, record.parent, start)

    def give_up(self, start: int, size: int) -> None:
        """An extent that the arena was made around is not wanted."""
        self._extents.give(start, size)

    def drop(self, entry: Entry) -> None:
        """Forget a value now; its bytes go with the last reference."""
        if entry.removed:
            return
        if entry.pin and self.unpin is not None:
            self.unpin(entry)
            if self._slots[entry.slot] is not entry:
                return  # it was dead already, and that was its last reference
        if entry.listed:
            self._tree.remove(entry.name)
            entry.listed = False
        entry.fresh = 0
        self._unname(entry)
        if entry.refs:
            entry.removed = True
        else:
            self._free(entry)
        self.room_made += 1

    def drain_reclaim(self, limit: int) -> int:
        """Free up to `limit` values of invalidated scopes; how many are left."""
        reclaim = self.scopes.reclaim
        while reclaim and limit > 0:
            entries = reclaim[-1]
            if not entries:
                reclaim.pop()
                continue
            _, entry = entries.popitem()
            if self._slots[entry.slot] is entry:
                self.drop(entry)
            limit -= 1
        return sum(map(len, reclaim))

    def entries(self) -> list[Entry]:
        """All values that can be found."""
        return [entry for entry in self._slots if entry is not None and entry.live]

    def _unname(self, entry: Entry) -> None:
        scope = entry.scope
        if scope.entries.get(entry.name) is entry:
            del scope.entries[entry.name]
        if scope.tenant.quota_bytes:
            scope.tenant.order.pop(entry.name, None)
        self._mirror.discard(entry)
        if self.changed is not None:
            self.changed[entry.name] = False
        if self.wanted:
            self.wanted.pop(entry.name, None)

    def _place(self, entry: Entry, start: int) -> None:
        length = rounded(entry.size)
        del self._starts[entry.offset], self._ends[entry.offset + length]
        self._generation += 1
        entry.offset, entry.generation = start, self._generation
        self._starts[start] = entry
        self._ends[start + length] = entry

    def _free(self, entry: Entry) -> None:
        length = rounded(entry.size)
        del self._starts[entry.offset], self._ends[entry.offset + length]
        self._extents.give(entry.offset, entry.size)
        entry.scope.tenant.used_bytes -= length
        self._slots[entry.slot] = None
        self._free_slots.append(entry.slot)

    def _entry(self, slot: int) -> Entry:
        entry = self._slots[slot]
        if entry is None:
            raise InvariantBroken(f"the tree names entry {slot}, which is free")
        return entry
