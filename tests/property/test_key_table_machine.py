"""The directory's key table, compiled and in plain Python, against a naive model: same answers to every call."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from anabranch.core.errors import InvalidInput
from anabranch.store.values.contracts import KeyTable
from anabranch.store.values.key_table import ALL_TIERS, HOLDERS, MAX_MEMBER, DictKeyTable
from anabranch.store.values.live.key_table import PARTS, CompiledKeyTable, make_key_table
from anabranch.store.values.live.native import library
from anabranch.store.values.scope import NAME_BYTES

CHANCE = random.Random(17)
NAMES = [CHANCE.randbytes(NAME_BYTES) for _ in range(40)]
# Same first word: one home in the compiled table, one part in the other; and a name of zeros.
NAMES += [NAMES[0][:8] + CHANCE.randbytes(24) for _ in range(12)] + [bytes(NAME_BYTES)]
MEMBERS = [0, 1, 2, 7, 8, MAX_MEMBER]
names = st.lists(st.sampled_from(NAMES), max_size=40)
members = st.sampled_from(MEMBERS)
tiers = st.integers(1, ALL_TIERS)


def each(names: bytes) -> list[bytes]:
    return [names[at : at + NAME_BYTES] for at in range(0, len(names), NAME_BYTES)]


def walk(step: Callable[[int], int]) -> None:
    at = step(0)
    while at:
        at = step(at)


def held(table: KeyTable, members: Iterable[int], count: int) -> list[bytes]:
    found: list[bytes] = []

    def step(at: int) -> int:
        some, following = table.held(members, at, count)
        found.extend(each(some))
        return following

    walk(step)
    return sorted(found)


class KeyTableMachine(RuleBasedStateMachine):
    """Model: name → {member: tiers}, in the order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[KeyTable] = [DictKeyTable(), make_key_table()]
        self.model: dict[bytes, dict[int, int]] = {}

    def same(self, call: Callable[[KeyTable], int], expected: int) -> None:
        assert [call(table) for table in self.tables] == [expected, expected]

    @rule(member=members, tier=tiers, names=names)
    def add(self, member: int, tier: int, names: list[bytes]) -> None:
        fresh = 0
        for name in names:
            holders = self.model.setdefault(name, {})
            if member in holders or len(holders) < HOLDERS:
                fresh += member not in holders
                holders[member] = holders.get(member, 0) | tier
        self.same(lambda table: table.add(member, tier, b"".join(names)), fresh)

    @rule(member=members, tier=tiers, names=names)
    def discard(self, member: int, tier: int, names: list[bytes]) -> None:
        gone = 0
        for name in names:
            holders = self.model.get(name, {})
            if member in holders:
                holders[member] &= ~tier
                if not holders[member]:
                    gone += 1
                    self.drop(name, member)
        self.same(lambda table: table.discard(member, tier, b"".join(names)), gone)

    def drop(self, name: bytes, member: int) -> None:
        del self.model[name][member]
        if not self.model[name]:
            del self.model[name]

    @rule(dead=st.sets(members), count=st.integers(1, 60))
    def sweep(self, dead: set[int], count: int) -> None:
        for table in self.tables:
            walk(lambda at, table=table: table.sweep(dead, at, count))  # type: ignore[misc]
        self.forgotten(dead)

    @rule(member=members)
    def forget(self, member: int) -> None:
        for table in self.tables:
            table.forget(member)
        self.forgotten({member})

    def forgotten(self, dead: set[int]) -> None:
        for name, holders in list(self.model.items()):
            for member in dead & holders.keys():
                self.drop(name, member)

    @rule(wanted=st.sets(members), count=st.integers(1, 60))
    def names_held(self, wanted: set[int], count: int) -> None:
        expected = sorted(name for name, holders in self.model.items() if wanted & holders.keys())
        assert [held(table, wanted, count) for table in self.tables] == [expected, expected]

    @invariant()
    def same_places(self) -> None:
        expected = array("H")
        for name in NAMES:
            holders = [1 + (member << 3 | tier) for member, tier in self.model.get(name, {}).items()]
            expected.extend([*holders, 0, 0, 0, 0][:HOLDERS])
        assert [table.places(b"".join(NAMES)) for table in self.tables] == [expected.tobytes()] * 2
        assert [len(table) for table in self.tables] == [len(self.model)] * 2


TestKeyTableMachine = KeyTableMachine.TestCase
TestKeyTableMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.fixture(params=["compiled", "python"])
def table(request: pytest.FixtureRequest) -> KeyTable:
    native = library()
    if request.param == "python":
        return DictKeyTable()
    if native is None:
        pytest.skip("no compiled library")
    return CompiledKeyTable(native)


def test_many_names_grow_every_part_and_leave_again(table: KeyTable) -> None:
    chance = random.Random(2)
    blobs = [chance.randbytes(NAME_BYTES * 20_000) for _ in range(4)]
    empty = table.memory_bytes
    for member, blob in enumerate(blobs):
        assert table.add(member, 1, blob) == 20_000
        assert table.add(member, 2, blob) == 0
    assert len(table) == 80_000
    if isinstance(table, CompiledKeyTable):
        assert table.memory_bytes - empty < 100 * len(table)
    places = array("H", table.places(blobs[2]))
    assert set(places[::HOLDERS]) == {1 + (2 << 3 | 3)}
    assert set(places) == {0, places[0]}
    assert held(table, [1], 5_000) == sorted(each(blobs[1]))
    assert table.discard(0, 3, blobs[0]) == 20_000
    walk(lambda at: table.sweep([1, 3], at, 3_000))
    assert len(table) == 20_000
    assert held(table, range(4), 1 << 40) == sorted(each(blobs[2]))
    table.forget(2)
    assert len(table) == 0
    if isinstance(table, CompiledKeyTable):
        assert table.memory_bytes < empty + (2 << 20)


def test_a_sweep_takes_steps_and_misses_nothing_that_grows_meanwhile(table: KeyTable) -> None:
    chance = random.Random(3)
    dead = chance.randbytes(NAME_BYTES * 5_000)
    table.add(5, 1, dead)
    steps = 0

    def step(at: int) -> int:
        nonlocal steps
        steps += 1
        table.add(6, 1, chance.randbytes(NAME_BYTES * 2_000))
        return table.sweep([5], at, 500)

    walk(step)
    assert steps > 3
    assert table.places(dead) == bytes(len(dead) // NAME_BYTES * HOLDERS * 2)
    assert len(table) == 2_000 * steps


@pytest.mark.parametrize(
    ("member", "tier", "size"), [(-1, 1, 32), (MAX_MEMBER + 1, 1, 32), (0, 0, 32), (0, 8, 32), (0, 1, 33)]
)
def test_what_cannot_be_is_refused(table: KeyTable, member: int, tier: int, size: int) -> None:
    for call in (table.add, table.discard):
        with pytest.raises(InvalidInput):
            call(member, tier, bytes(size))
    with pytest.raises(InvalidInput):
        table.places(bytes(31))
    with pytest.raises(InvalidInput):
        table.sweep([MAX_MEMBER + 1], 0, 1)
    for at in (-1, PARTS):
        with pytest.raises(InvalidInput):
            table.held([1], at, 1)
    assert len(table) == 0
