"""A node's DRAM: which values lie where, who uses them, what goes to make room.

Pure and single-threaded: the owner calls it under one lock and says what time it is. Names, the order of eviction and
children-before-parents are `paging.prefix_tree`'s and `policy.eviction`'s, bytes are `paging.extents`'s.

**Covers** residency, references, eviction, quotas, invalidation. **See also** `puts`, `reads`, `pins`: who comes and
asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from anabranch.core.errors import InvariantBroken
from anabranch.paging.extents import Extents, rounded
from anabranch.policy.eviction.contract import EvictionPolicy
from anabranch.store.values.compaction import Compaction
from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry, ScopeState, Tenant
from anabranch.store.values.order import EvictionOrder
from anabranch.store.values.scopes import Scopes

SMALL_BYTES = 64 << 10
SMALL_SHARE = 8
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
    """`first_generation`: above all that were ever used with this arena. With `small_policy`, values
    below `small_bytes` have an order of eviction of their own, in which at least 1/SMALL_SHARE of the arena stays when
    large ones come. `leaving(entry)` is called for a value that is
    evicted, while its bytes are still there; `unpin` ends the pin of one that is dropped."""

    def __init__(
        self,
        arena_bytes: int,
        policy: EvictionPolicy,
        small_policy: EvictionPolicy | None = None,
        *,
        max_entries: int,
        small_bytes: int = SMALL_BYTES,
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
        self._extents = Extents(arena_bytes) if extents is None else extents
        self._large = EvictionOrder(policy)
        self._small = EvictionOrder(small_policy) if small_policy is not None else self._large
        self._small_below = small_bytes
        self._small_bytes = 0
        self._mirror = NoMirror() if mirror is None else mirror
        self._max_entries = max_entries
        self._slots: list[Entry | None] = []
        self._free_slots: list[int] = []
        self._owners: dict[bytes, Entry] = {}
        self._generation = first_generation - 1
        self._starts: dict[int, Entry] = {}
        self._ends: dict[int, Entry] = {}
        self._compaction = Compaction(self._extents, self._starts, self._ends, self._move, self.drop)
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
        self._order(entry).touch(entry)
        tenant = entry.scope.tenant
        if tenant.quota_bytes:
            tenant.order.move_to_end(entry.name)

    def hold(self, entry: Entry) -> None:
        """The bytes stay until `release`."""
        entry.refs += 1
        if entry.refs == 1:
            self._held_bytes += rounded(entry.size)
            self._order(entry).hold(entry)

    def keep(self, entry: Entry) -> None:
        """It is not evicted until `let_go`, for something is coming that is built on it. Unlike `hold` this costs the
        same however long the chain is, unless it would have to go."""
        entry.kept += 1

    def let_go(self, entry: Entry) -> None:
        entry.kept -= 1
        if not entry.kept:
            self._order(entry).let_go(entry)
            self.room_made += 1

    def list_held(self, entry: Entry) -> None:
        """What a value in use is built on is not evicted, however new it is."""
        if entry.refs:
            self._order(entry).list_held(entry)

    def release(self, entry: Entry) -> None:
        if entry.refs < 1:
            raise InvariantBroken(f"value {entry.name.hex()} was released more often than held")
        entry.refs -= 1
        if entry.refs:
            return
        self._held_bytes -= rounded(entry.size)
        self.room_made += 1
        if entry.removed:
            self._free(entry)
        elif entry.listed or entry.live:
            self._order(entry).release(entry)
        else:
            self.drop(entry)

    def catch_up(self, count: int) -> None:
        """Let eviction know of reads and of up to `count` new values, in a quiet moment."""
        for order in {self._large, self._small}:
            order.settle()
            order.list_fresh(count)

    def set_quota(self, tenant: Tenant, quota_bytes: int, pin_quota_bytes: int) -> None:
        if quota_bytes and not tenant.quota_bytes:
            for state in self.scopes.states():
                if state.tenant is tenant:
                    tenant.order.update(state.entries)
                    for entry in state.entries.values():
                        self._order(entry).list_now(entry)
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

    def _make_room(self, size: int, need: int) -> int | None:
        if need > self.evictable_bytes:
            return None
        if self.scopes.reclaim:
            self.drain_reclaim(EVICTED_AT_ONCE)
            self.unfinished = True
            return self._extents.take(size)
        first, second = self._orders(need)
        first.prepare()
        gone = self._gone
        for _ in range(EVICTED_AT_ONCE):
            if not (self._evict(first) or self._evict(second)):
                self._gone = 0
                return None
            gone += self._last_size
            start = self._extents.take(size)
            if start is None and gone >= 2 * need:
                start = self._compaction.clear(size)
                gone = need
            if start is not None:
                self._gone = 0
                return start
        self._gone = gone
        self.unfinished = True
        return None

    def _order(self, entry: Entry) -> EvictionOrder:
        return self._small if entry.small else self._large

    def _orders(self, need: int) -> tuple[EvictionOrder, EvictionOrder]:
        """Who goes first, and if they are all in use. Thousands of small values are not asked to make room for a large
        one, nor large ones for a small one unless small ones have little anyhow."""
        if need < self._small_below and self._small_bytes > self._extents.size // SMALL_SHARE:
            return self._small, self._large
        return self._large, self._small

    def _evict(self, order: EvictionOrder) -> bool:
        while (slot := order.victim()) is not None:
            entry = self._entry(slot)
            if not entry.kept:
                self._evicted(entry)
                return True
            order.put_back(entry)
        return False

    def _evicted(self, entry: Entry) -> None:
        if self.leaving is not None and entry.live:
            self.leaving(entry)
        self._last_size = rounded(entry.size)
        entry.listed = False
        self._unname(entry)
        self._free(entry)
        self.counters["evicted"] += 1
        self.counters["evicted_bytes"] += entry.size

    def _shrink(self, tenant: Tenant, need: int) -> bool:
        """Evict the tenant's least recently used values until `need` more bytes fit its quota."""
        self._large.settle()
        self._small.settle()
        order = tenant.order
        tries = 2 * len(order)
        evicted = 0
        while tenant.used_bytes + need > tenant.quota_bytes and tries > 0:
            if evicted == EVICTED_AT_ONCE:
                self.unfinished = True
                return False
            tries -= 1
            name, entry = next(iter(order.items()))
            if self._order(entry).evict(entry):
                self._evicted(entry)
                evicted += 1
                self.counters["evicted_for_quota"] += 1
            else:
                # In use, or others are built on it: those come later in the order now.
                order.move_to_end(name)
            if not order:
                break
        return tenant.used_bytes + need <= tenant.quota_bytes

    # --- names ----------------------------------------------------------------------------------------------------

    def commit(
        self, scope: ScopeState, name: bytes, size: int, sums: tuple[int, ...], parent: bytes, start: int
    ) -> Entry:
        """Name what was reserved; the caller has made sure that the name is free in its scope. The entry has one
        reference, the caller's."""
        former = self._owners.get(name)
        if former is not None:
            self.drop(former)  # of an invalidated scope, or of another one that took the same name
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
        while not self._free_slots and len(slots) >= self._max_entries and any(map(self._evict, self._orders(0))):
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
        # A chain stays in one order, which keeps its children before their parents.
        before = scope.entries.get(parent) if parent else None
        entry.small = length < self._small_below if before is None else before.small
        if entry.small:
            self._small_bytes += length
        self._held_bytes += length
        self._reserved_bytes -= length
        slots[slot] = entry
        scope.entries[name] = entry
        self._owners[name] = entry
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

    def adopted(self, entries: list[Entry]) -> None:
        """End the references of adopted values, which come in the order in which they were made. Eviction hears of them
        later: a node shall be back soon."""
        for entry in reversed(entries):
            entry.refs = 0
            self._held_bytes -= rounded(entry.size)
            if entry.scope.tenant.quota_bytes:
                self._order(entry).release(entry)
            else:
                self._order(entry).defer(entry)

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
        self._order(entry).forget(entry)
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

    def taken(self, scope: ScopeState, name: bytes) -> bool:
        """Another scope has a value under this very name. Names are digests that scopes do not share, so whoever asks
        has made it up or copied it: one node keeps one value a name."""
        entry = self._owners.get(name)
        return entry is not None and entry.scope is not scope and entry.live

    def entries(self) -> list[Entry]:
        """All values that can be found."""
        return [entry for state in self.scopes.states() for entry in state.entries.values()]

    def _unname(self, entry: Entry) -> None:
        scope = entry.scope
        if scope.entries.get(entry.name) is entry:
            del scope.entries[entry.name]
        if self._owners.get(entry.name) is entry:
            del self._owners[entry.name]
        if scope.tenant.quota_bytes:
            scope.tenant.order.pop(entry.name, None)
        self._mirror.discard(entry)
        if self.changed is not None:
            self.changed[entry.name] = False
        if self.wanted:
            self.wanted.pop(entry.name, None)

    def _move(self, entry: Entry, target: int) -> None:
        """The value's bytes lie at `target` from now on; its former extent is free."""
        length, was = rounded(entry.size), entry.offset
        self._mirror.discard(entry)
        self._mirror.move(was, target, entry.size)
        del self._starts[was], self._ends[was + length]
        self._generation += 1
        entry.offset, entry.generation = target, self._generation
        self._starts[target] = entry
        self._ends[target + length] = entry
        self._mirror.put(entry)
        self._extents.give(was, entry.size)
        self.counters["moved"] += 1

    def _free(self, entry: Entry) -> None:
        length = rounded(entry.size)
        del self._starts[entry.offset], self._ends[entry.offset + length]
        self._extents.give(entry.offset, entry.size)
        if entry.small:
            self._small_bytes -= length
        entry.scope.tenant.used_bytes -= length
        self._slots[entry.slot] = None
        self._free_slots.append(entry.slot)

    def _entry(self, slot: int) -> Entry:
        entry = self._slots[slot]
        if entry is None:
            raise InvariantBroken(f"the tree names entry {slot}, which is free")
        return entry
