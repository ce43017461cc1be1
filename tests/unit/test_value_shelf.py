"""The brain of a value node's DRAM: who may be there, who goes, and whose room it is."""

from __future__ import annotations

import pytest

from anabranch.core.errors import InvariantBroken, WireError
from anabranch.paging.extents import Extents
from anabranch.policy.eviction.lru import Lru
from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.pins import Pins
from anabranch.store.values.puts import Put, Puts
from anabranch.store.values.reads import Reads
from anabranch.store.values.scope import Scope
from anabranch.store.values.shelf import EVICTED_AT_ONCE, SMALL_BYTES, NoMirror, Shelf
from anabranch.store.values.slices import SLICE_BYTES

PAGE = 4096
OK, FULL, SEND = Outcome.OK, Outcome.FULL, Outcome.SEND


def name(i: int) -> bytes:
    return i.to_bytes(32, "big")


class Rig:
    def __init__(self, pages: int = 16) -> None:
        self.mirror = Moves()
        self.shelf = Shelf(pages * PAGE, Lru(), max_entries=10_000, mirror=self.mirror)
        self.puts, self.reads = Puts(self.shelf), Reads(self.shelf, 10.0)
        self.pins = Pins(self.shelf, quota_bytes=8 * PAGE, max_pin_s=100.0)
        self.scope = self.shelf.scopes.open(Scope("t"))

    def put(self, i: int, pages: float = 1, *, parent: bytes = b"", scope: ScopeState | None = None) -> Outcome:
        put = self.puts.begin(self, scope or self.scope, name(i), [int(pages * PAGE)], parent=parent)
        while put.unfinished:
            self.puts.place(put)
        item = put.items[0]
        if item.outcome is SEND:
            entry = self.puts.commit(item, (i,))
            if entry is not None:
                self.puts.settle([entry])
        return item.outcome

    def entry(self, i: int) -> Entry:
        return self.scope.entries[name(i)]

    def here(self, *numbers: int) -> list[int]:
        return [i for i in numbers if name(i) in self.scope.entries]


class Moves(NoMirror):
    def __init__(self) -> None:
        self.moves: list[tuple[int, int, int]] = []
        self.there: dict[bytes, int] = {}

    def put(self, entry: Entry) -> None:
        self.there[entry.name] = entry.generation

    def discard(self, entry: Entry) -> None:
        self.there.pop(entry.name, None)

    def move(self, source: int, target: int, size: int) -> None:
        self.moves.append((source, target, size))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_least_recently_used_first_and_reads_count(rig: Rig) -> None:
    assert [rig.put(i) for i in range(16)] == [OK] * 16
    rig.shelf.touch(rig.entry(0))
    assert rig.put(16, 2) is OK
    assert rig.here(0, 1, 2, 3) == [0, 3]
    assert rig.mirror.there.keys() == rig.scope.entries.keys()


def test_children_go_before_their_parents(rig: Rig) -> None:
    for i in range(16):
        rig.put(i, parent=name(i - 1) if i else b"")
    rig.put(100, 4)
    assert rig.here(*range(16)) == list(range(12))


def test_what_is_in_use_stays_and_too_much_evicts_nothing(rig: Rig) -> None:
    for i in range(16):
        rig.put(i)
    lease = rig.reads.grant(rig, [rig.entry(i) for i in range(10)], 0.0)
    assert rig.put(100, 7) is FULL
    assert rig.here(*range(16)) == list(range(16)), "nobody is evicted for what cannot fit"
    assert rig.put(101, 6) is OK
    assert rig.reads.give_back(object(), lease.number) is False
    assert rig.reads.expire(9.9) == 0
    assert rig.reads.expire(10.0) == 1
    assert rig.put(102, 16) is OK
    assert rig.put(103, 17) is Outcome.TOO_BIG
    assert rig.here(102) == [102]


def test_large_evictions_are_done_in_steps() -> None:
    rig = Rig(2 * EVICTED_AT_ONCE)
    for i in range(2 * EVICTED_AT_ONCE):
        rig.put(i)
    put = rig.puts.begin(rig, rig.scope, name(1000), [rig.shelf.capacity])
    assert put.unfinished
    assert len(rig.shelf) == EVICTED_AT_ONCE
    assert rig.puts.place(put)
    assert put.outcomes == bytes([SEND])


def test_scattered_room_is_brought_together(rig: Rig) -> None:
    for i in range(16):
        rig.put(i)
    kept = [rig.entry(i) for i in range(1, 16, 2)]
    for entry in kept:
        rig.shelf.touch(entry)
    assert rig.put(100, 3) is OK
    assert rig.mirror.moves, "values were moved, not thrown out"
    assert len(rig.here(*range(16))) == 10
    assert rig.mirror.there == {e.name: e.generation for e in rig.scope.entries.values()}
    assert sorted({e.offset for e in rig.shelf.entries()}) == sorted(e.offset for e in rig.shelf.entries())


def test_a_tenants_quota_costs_its_own_values_only(rig: Rig) -> None:
    other = rig.shelf.scopes.open(Scope("other"))
    rig.shelf.set_quota(rig.scope.tenant, 4 * PAGE, 0)
    for i in range(100, 108):
        assert rig.put(i, scope=other) is OK
    for i in range(6):
        assert rig.put(i) is OK
    assert rig.here(*range(6)) == [2, 3, 4, 5]
    assert len(other.entries) == 8
    assert rig.put(7, 5) is Outcome.TOO_BIG
    rig.reads.grant(rig, [rig.entry(i) for i in range(3, 6)], 0.0)
    assert rig.put(8, 2) is FULL
    assert rig.scope.tenant.used_bytes <= 4 * PAGE


def test_a_quota_that_comes_later_counts_what_is_there(rig: Rig) -> None:
    for i in range(6):
        rig.put(i)
    rig.shelf.set_quota(rig.scope.tenant, 4 * PAGE, 0)
    assert rig.put(6) is OK
    assert rig.scope.tenant.used_bytes == 4 * PAGE


def test_pins_count_against_their_quota_and_end(rig: Rig) -> None:
    for i in range(9):
        rig.put(i)
    assert [rig.pins.pin(rig.entry(i), 50.0, 0.0) for i in range(9)] == [OK] * 8 + [FULL]
    assert rig.pins.pin(rig.entry(0), 1e9, 0.0) is OK
    assert rig.put(100, 9) is FULL
    assert rig.pins.expire(50.0) == 7
    assert rig.put(101, 9) is OK
    rig.shelf.drop(rig.entry(0))
    assert len(rig.pins) == 0
    assert rig.scope.tenant.pinned_bytes == 0


def test_invalidation_is_at_once_and_its_room_comes_in_steps(rig: Rig) -> None:
    for i in range(10):
        rig.put(i)
    held = rig.reads.grant(rig, [rig.entry(0)], 0.0)
    under_way = rig.puts.begin(rig, rig.scope, name(50), [PAGE])
    assert rig.shelf.scopes.invalidate(rig.scope) == 10
    assert rig.here(*range(10)) == []
    assert rig.put(3) is OK, "the name is free at once"
    assert rig.puts.commit(under_way.items[0], (1,)) is None
    assert under_way.outcomes == bytes([Outcome.STALE])
    assert rig.shelf.drain_reclaim(4) > 0
    assert rig.shelf.drain_reclaim(100) == 0
    assert rig.here(3) == [3]
    assert len(rig.shelf) == 2
    rig.reads.give_back(rig, held.number)
    assert rig.shelf.used_bytes == PAGE


def test_an_unnamed_scope_gets_its_name_and_its_bill_later(rig: Rig) -> None:
    scope = Scope("late", epoch="e")
    state = rig.shelf.scopes.known(scope.digest())
    rig.put(1, scope=state)
    assert rig.shelf.scopes.of("late", None) == []
    assert rig.shelf.scopes.open(scope) is state
    assert state.tenant.used_bytes == PAGE
    assert rig.shelf.scopes.of("late", "e") == [state] == rig.shelf.scopes.of("late", None)


def open_put(rig: Rig, i: int, size: int) -> Put:
    put = rig.puts.begin(rig, rig.scope, name(i), [size])
    rig.puts.open(put, 0.0)
    return put


def test_an_extent_is_free_only_when_nobody_writes_into_it() -> None:
    rig = Rig(1024)
    put = open_put(rig, 1, 3 * SLICE_BYTES)
    assert rig.puts.begin_slice(rig, put.number, 0, 1, 0.0) is not None
    assert rig.puts.begin_slice(rig, put.number, 0, 1, 0.0) is None, "one writer a slice"
    assert rig.puts.begin_slice(object(), put.number, 0, 2, 0.0) is None, "another caller"
    used = rig.shelf.used_bytes
    rig.puts.abandon(put)
    assert rig.shelf.used_bytes == used
    assert rig.puts.begin_slice(rig, put.number, 0, 2, 0.0) is None
    rig.puts.end_slice(put, 0, 1, 7)
    assert rig.shelf.used_bytes == 0
    assert rig.put(1) is OK


def test_a_slice_that_comes_again_must_be_whole_again() -> None:
    rig = Rig(1024)
    put = open_put(rig, 1, SLICE_BYTES + 1)
    for slice_ in (0, 1):
        rig.puts.begin_slice(rig, put.number, 0, slice_, 0.0)
        rig.puts.end_slice(put, 0, slice_, slice_)
    rig.puts.begin_slice(rig, put.number, 0, 0, 0.0)
    assert rig.puts.seal(put, [0, 1], 0.0)[0] == [(0, 0)]
    rig.puts.end_slice(put, 0, 0, None)
    assert rig.puts.seal(put, [0, 1], 0.0)[0] == [(0, 0)]
    rig.puts.begin_slice(rig, put.number, 0, 0, 0.0)
    rig.puts.end_slice(put, 0, 0, 5)
    assert rig.puts.seal(put, [0, 1], 0.0)[0] == [(0, 0)], "not what the sender means"
    missing, entries = rig.puts.seal(put, [5, 1], 0.0)
    assert (missing, [e.sums for e in entries]) == ([], [(5, 1)])
    assert len(rig.puts) == 0


def test_a_put_of_which_nothing_comes_ends(rig: Rig) -> None:
    put = open_put(rig, 1, PAGE)
    assert rig.puts.expire(29.0) == []
    rig.puts.begin_slice(rig, put.number, 0, 0, 29.0)
    rig.puts.end_slice(put, 0, 0, None)
    assert rig.puts.expire(31.0) == []
    assert rig.puts.expire(59.0) == [put]
    assert rig.shelf.used_bytes == 0


def test_nonsense_is_refused(rig: Rig) -> None:
    with pytest.raises(WireError):
        rig.puts.begin(rig, rig.scope, b"x", [1])
    with pytest.raises(WireError):
        rig.puts.begin(rig, rig.scope, name(1), [-1])
    put = open_put(rig, 1, PAGE)
    for index, slice_ in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(WireError):
            rig.puts.begin_slice(rig, put.number, index, slice_, 0.0)
    with pytest.raises(WireError):
        rig.puts.seal(put, [1, 2], 0.0)
    rig.put(2)
    with pytest.raises(InvariantBroken):
        rig.shelf.release(rig.entry(2))


def test_a_ring_of_parents_is_cut(rig: Rig) -> None:
    assert rig.put(1, parent=name(2)) is OK
    assert rig.put(2, parent=name(1)) is OK
    assert rig.put(3, parent=name(3)) is OK
    for i in range(10, 26):
        assert rig.put(i) is OK


def test_names_that_changed_are_told(rig: Rig) -> None:
    rig.shelf.changed = {}
    rig.put(1)
    rig.put(2)
    rig.shelf.drop(rig.entry(1))
    assert rig.shelf.changed == {name(1): False, name(2): True}


def test_small_values_do_not_make_room_for_large_ones_one_by_one() -> None:
    shelf = Shelf(64 * SMALL_BYTES, Lru(), Lru(), max_entries=10_000)
    puts, scope = Puts(shelf), shelf.scopes.open(Scope("t"))

    def put(i: int, size: int) -> None:
        put = puts.begin(None, scope, name(i), [size])
        entry = puts.commit(put.items[0], (i,))
        assert entry is not None
        puts.settle([entry])

    small, large = range(100), range(1000, 1070)
    for i in small:
        put(i, 100)
    for i in large:
        put(i, SMALL_BYTES)
    assert all(name(i) in scope.entries for i in small)
    assert sum(name(i) in scope.entries for i in large) == 63
    for i in range(2000, 2000 + 64):
        put(i, PAGE)
    assert all(name(i) in scope.entries for i in small), "small ones have little: a large one went"
    for i in range(3000, 3000 + 16 * 64):
        put(i, PAGE)
    assert sum(name(i) in scope.entries for i in large) >= 50, "small ones make room for each other"


def test_a_name_that_another_scope_has_is_refused() -> None:
    rig = Rig()
    other = rig.shelf.scopes.open(Scope("other"))
    assert rig.put(1) is OK
    assert rig.put(1, scope=other) is Outcome.DENIED
    assert rig.here(1) == [1]
    # Both under way at once: the first to finish has it.
    first = rig.puts.begin(rig, rig.scope, name(2), [PAGE]).items[0]
    second = rig.puts.begin(rig, other, name(2), [PAGE]).items[0]
    entry = rig.puts.commit(second, (2,))
    assert entry is not None
    assert rig.puts.commit(first, (2,)) is None
    assert first.outcome is Outcome.DENIED
    rig.puts.settle([entry])
    rig.shelf.drop(entry)
    assert rig.put(2) is OK
    assert rig.shelf.used_bytes == 2 * PAGE


def test_a_name_of_an_invalidated_scope_is_free_again_at_once() -> None:
    rig = Rig()
    assert rig.put(1) is OK
    rig.shelf.scopes.invalidate(rig.scope)
    other = rig.shelf.scopes.open(Scope("other"))
    assert rig.put(1, scope=other) is OK
    rig.shelf.drain_reclaim(100)
    assert list(other.entries) == [name(1)]
    assert rig.shelf.used_bytes == PAGE


def test_adopted_chains_are_evicted_from_their_end() -> None:
    before = Rig()
    for i in range(16):
        before.put(i, parent=name(i - 1) if i else b"")
    found = [(Record(e.name, e.scope.digest, e.size, e.sums, e.parent), e.offset) for e in before.shelf.entries()]
    extents, kept = Extents.around(16 * PAGE, [(offset, record.size) for record, offset in found])
    assert all(kept)
    shelf = Shelf(16 * PAGE, Lru(), max_entries=100, extents=extents)
    shelf.adopted([shelf.adopt(record, offset) for record, offset in found])
    assert (shelf.used_bytes, shelf.held_bytes, shelf.reserved_bytes) == (16 * PAGE, 0, 0)
    puts, scope = Puts(shelf), shelf.scopes.open(Scope("t"))
    assert puts.begin(None, scope, name(100), [4 * PAGE]).outcomes == bytes([SEND])
    assert [i for i in range(16) if name(i) in scope.entries] == list(range(12))


def test_a_chain_that_does_not_fit_keeps_its_beginning_and_has_no_hole(rig: Rig) -> None:
    parent, outcomes = b"", []
    for first in range(0, 40, 5):
        names = b"".join(map(name, range(first, first + 5)))
        put = rig.puts.begin(rig, rig.scope, names, [PAGE] * 5, chain=True, parent=parent)
        if any(item.outcome is FULL for item in put.items):
            assert rig.puts.in_its_own_way(put), "nobody who waits would find room"
        entries = [rig.puts.commit(item, (0,)) for item in put.items if item.outcome is SEND]
        rig.puts.settle([entry for entry in entries if entry is not None])
        outcomes += [item.outcome for item in put.items]
        parent = names[-32:]
    assert outcomes == [OK] * 16 + [FULL] * 24
    assert rig.here(*range(40)) == list(range(16))
    assert rig.shelf.held_bytes == 0
    assert rig.put(100, 4) is OK, "afterwards it may go, from its end on"
    assert rig.here(*range(40)) == list(range(12))


def test_a_chain_waits_for_others_but_evicts_what_is_not_its_own(rig: Rig) -> None:
    for i in range(8):
        rig.put(i, parent=name(i - 1) if i else b"")
    for i in range(100, 108):
        rig.put(i)
    lease = rig.reads.grant(rig, [rig.entry(107)], 0.0)
    assert [rig.put(i, parent=name(i - 1)) for i in range(8, 15)] == [OK] * 7
    put = rig.puts.begin(rig, rig.scope, name(15), [PAGE], parent=name(14))
    assert put.items[0].outcome is FULL
    assert not rig.puts.in_its_own_way(put)
    rig.reads.give_back(rig, lease.number)
    assert rig.puts.place(put)
    rig.puts.refuse(put.items[0], Outcome.STALE)
    assert rig.here(*range(15)) == list(range(15))
    assert rig.shelf.held_bytes == 0


def test_parts_of_a_chain_under_way_at_once_hold_what_came_before(rig: Rig) -> None:
    puts, parent = [], b""
    for first in range(0, 15, 3):
        names = b"".join(map(name, range(first, first + 3)))
        puts.append(rig.puts.begin(rig, rig.scope, names, [PAGE] * 3, chain=True, parent=parent))
        parent = names[-32:]
    for put in puts[:4]:
        rig.puts.settle([entry for item in put.items if (entry := rig.puts.commit(item, (0,)))])
    assert rig.put(100, 2) is FULL, "the fifth part is built on the other four"
    for item in puts[4].items:
        rig.puts.refuse(item, Outcome.STALE)
    assert rig.shelf.held_bytes == 0
    assert rig.put(100, 5) is OK
    assert rig.here(*range(15)) == list(range(11))
