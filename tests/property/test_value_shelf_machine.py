"""Puts, gets, leases, pins, eviction and invalidation against a plain model of what a node may and must hold."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from anabranch.paging.extents import rounded
from anabranch.policy.eviction.choice import EVICTION_NAMES, EvictionName, eviction_policy
from anabranch.store.values.entries import Entry
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.pins import Pins
from anabranch.store.values.puts import Put, Puts
from anabranch.store.values.reads import Lease, Reads
from anabranch.store.values.scope import Scope
from anabranch.store.values.shelf import Shelf

PAGE = 4096
PAGES = 12
LEASE_S = 10.0
NAMES = st.integers(0, 30)
SIZES = st.sampled_from([0, 1, 100, 3000, PAGE, PAGE + 1, 3 * PAGE, 13 * PAGE])
OK, SEND = Outcome.OK, Outcome.SEND


class Memory:
    """A mirror that is the arena too: a value is its number on every grain."""

    def __init__(self) -> None:
        self.grains: list[int] = [0] * (PAGES * PAGE // 64)
        self.shown: dict[bytes, tuple[int, int, int]] = {}

    def write(self, start: int, size: int, number: int) -> None:
        for at in range(start // 64, (start + rounded(size)) // 64):
            self.grains[at] = number

    def holds(self, start: int, size: int, number: int) -> bool:
        return all(self.grains[at] == number for at in range(start // 64, (start + rounded(size)) // 64))

    def put(self, entry: Entry) -> None:
        self.shown[entry.name] = entry.offset, entry.size, entry.generation

    def discard(self, entry: Entry) -> None:
        self.shown.pop(entry.name, None)

    def move(self, source: int, target: int, size: int) -> None:
        count = rounded(size) // 64
        self.grains[target // 64 : target // 64 + count] = self.grains[source // 64 : source // 64 + count]


class ShelfMachine(RuleBasedStateMachine):
    puts_open: Bundle[Put] = Bundle("puts_open")
    leases: Bundle[Lease] = Bundle("leases")

    @initialize(policy=st.sampled_from(EVICTION_NAMES), quota=st.sampled_from([0, 5 * PAGE]), two_orders=st.booleans())
    def begin(self, policy: EvictionName, quota: int, two_orders: bool) -> None:
        self.now = 0.0
        self.memory = Memory()
        orders = [eviction_policy(policy, 16, 8.0) for _ in range(1 + two_orders)]
        self.shelf = Shelf(PAGES * PAGE, *orders, max_entries=64, small_bytes=PAGE, mirror=self.memory)
        self.shelf.changed = {}
        self.puts = Puts(self.shelf)
        self.reads = Reads(self.shelf, LEASE_S)
        self.pins = Pins(self.shelf, quota_bytes=4 * PAGE, max_pin_s=50.0)
        self.scopes = [self.shelf.scopes.open(Scope(tenant)) for tenant in ("a", "b")]
        self.shelf.set_quota(self.scopes[0].tenant, quota, 0)
        self.number = 0
        self.wrote: dict[int, int] = {}  # slot of an entry's sums → number
        self.truth: dict[tuple[int, bytes], tuple[int, int]] = {}  # (scope, name) → (number, size) last committed
        self.leased: dict[int, list[tuple[Entry, int, int]]] = {}
        self.known: set[bytes] = set()

    # --- puts

    @rule(target=puts_open, scope=st.integers(0, 1), names=st.lists(NAMES, min_size=1, max_size=4), data=st.data())
    def offer(self, scope: int, names: list[int], data: st.DataObject) -> Put:
        sizes = [data.draw(SIZES) for _ in names]
        chain = data.draw(st.booleans())
        raw = b"".join([self.name(scope, n) for n in names])
        before = data.draw(st.none() | NAMES)
        parent = b"" if before is None else self.name(scope, before)
        put = self.puts.begin(self, self.scopes[scope], raw, sizes, chain=chain, parent=parent)
        while put.unfinished:
            self.puts.place(put)
        for item in put.items:
            if item.size > PAGES * PAGE:
                assert item.outcome is not SEND
            if item.outcome is SEND:
                self.number += 1
                self.wrote[id(item)] = self.number
                self.memory.write(item.start, item.size, self.number)
        return put

    @rule(put=consumes(puts_open))
    def commit(self, put: Put) -> None:
        entries = []
        for item in put.items:
            if item.outcome is not SEND:
                continue
            before = item.scope.entries.get(item.name)
            number = self.wrote.pop(id(item))
            entry = self.puts.commit(item, (number,))
            if entry is not None:
                assert before is None
                assert item.era == item.scope.era
                entries.append(entry)
                self.truth[self.scopes.index(item.scope), item.name] = number, item.size
            else:
                assert item.outcome in (Outcome.PRESENT, Outcome.DIFFERS, Outcome.STALE)
        self.puts.settle(entries)

    @rule(put=consumes(puts_open))
    def give_up(self, put: Put) -> None:
        for item in put.items:
            if item.outcome is SEND:
                self.wrote.pop(id(item))
                self.puts.refuse(item, Outcome.STALE)

    # --- gets

    @rule(target=leases, scope=st.integers(0, 1), names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def get(self, scope: int, names: list[int]) -> object:
        state = self.scopes[scope]
        entries = [e for n in names if (e := state.entries.get(self.name(scope, n))) is not None]
        for entry in entries:
            self.shelf.touch(entry)
        if not entries:
            return multiple()
        lease = self.reads.grant(self, entries, self.now)
        self.leased[lease.number] = [(e, *self.truth[scope, e.name]) for e in entries]
        return lease

    @rule(lease=consumes(leases))
    def give_back(self, lease: Lease) -> None:
        assert self.reads.give_back(self, lease.number) == (self.leased.pop(lease.number, None) is not None)

    @rule(scope=st.integers(0, 1), one=NAMES, seconds=st.sampled_from([0.0, 3.0, 30.0]))
    def pin(self, scope: int, one: int, seconds: float) -> None:
        entry = self.scopes[scope].entries.get(self.name(scope, one))
        if entry is not None:
            self.pins.pin(entry, seconds, self.now)

    # --- ends

    @rule(scope=st.integers(0, 1), one=NAMES)
    def remove(self, scope: int, one: int) -> None:
        entry = self.scopes[scope].entries.get(self.name(scope, one))
        if entry is not None:
            self.shelf.drop(entry)
            assert self.name(scope, one) not in self.scopes[scope].entries

    @rule(scope=st.integers(0, 1))
    def invalidate(self, scope: int) -> None:
        self.shelf.scopes.invalidate(self.scopes[scope])

    @rule(count=st.integers(1, 5))
    def reclaim(self, count: int) -> None:
        self.shelf.drain_reclaim(count)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.reads.expire(self.now)
        self.pins.expire(self.now)
        self.shelf.catch_up(2)
        alive = {number for number in self.leased if self.reads.get(self, number) is not None}
        self.leased = {number: held for number, held in self.leased.items() if number in alive}

    # --- what must hold

    @invariant()
    def every_name_has_its_own_bytes(self) -> None:
        for i, state in enumerate(self.scopes):
            for one, entry in state.entries.items():
                number, size = self.truth[i, one]
                assert (entry.size, entry.sums) == (size, (number,))
                assert self.memory.holds(entry.offset, size, number)

    @invariant()
    def what_is_leased_stays(self) -> None:
        for held in self.leased.values():
            for entry, number, size in held:
                assert self.memory.holds(entry.offset, size, number)

    @invariant()
    def readers_of_shared_memory_see_the_same(self) -> None:
        live = {e.name: (e.offset, e.size, e.generation) for state in self.scopes for e in state.entries.values()}
        dead = {e.name for entries in self.shelf.scopes.reclaim for e in entries.values()}
        assert {k: v for k, v in self.memory.shown.items() if k not in dead or k in live} == live

    @invariant()
    def the_directory_is_told_of_every_change(self) -> None:
        for one, there in (self.shelf.changed or {}).items():
            (self.known.add if there else self.known.discard)(one)
        self.shelf.changed = {}
        dead = {e.name for entries in self.shelf.scopes.reclaim for e in entries.values()}
        assert self.known - dead == {e.name for state in self.scopes for e in state.entries.values()} - dead

    @invariant()
    def books_add_up(self) -> None:
        shelf = self.shelf
        shelf._extents.check()
        shelf._large.check()
        shelf._small.check()
        assert shelf.used_bytes == sum(state.tenant.used_bytes for state in self.scopes)
        assert shelf.reserved_bytes >= 0
        assert shelf.held_bytes >= 0
        for state in self.scopes:
            assert not state.tenant.quota_bytes or state.tenant.used_bytes <= state.tenant.quota_bytes

    def teardown(self) -> None:
        if not hasattr(self, "shelf"):
            return
        self.now += 1000.0
        self.reads.expire(self.now)
        self.pins.expire(self.now)
        assert self.shelf.held_bytes == 0
        for state in self.scopes:
            self.shelf.scopes.invalidate(state)
        self.shelf.drain_reclaim(1000)
        assert self.shelf.used_bytes == self.shelf.reserved_bytes
        assert len(self.shelf) == 0

    @staticmethod
    def name(scope: int, one: int) -> bytes:
        return bytes([scope]) * 31 + bytes([one])


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
