"""SlotPool against a naive model that recomputes everything from dicts, with every eviction policy.

The exact order is promised by "lru" only; of all others the invariants: children first, nothing in use, progress."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.paging.pool import SlotPool, State
from anabranch.policy.eviction.choice import EvictionName, eviction_policy

SLOTS = 6
NAMES = [bytes([97 + i]) for i in range(10)]


class Block:
    def __init__(self, slot: int, parent: bytes, used: int) -> None:
        self.slot, self.parent, self.used = slot, parent, used


class NaivePool:
    """`blocks`: key → Block; `refs`: every slot that is not free. `used` is when the last reference in the block's
    subtree went, found by asking on every tick."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.refs: dict[int, int] = {}
        self.private: set[int] = set()
        self.removed: set[int] = set()
        self.now = 0

    def busy(self, key: bytes) -> bool:
        below = any(self.busy(other) for other, block in self.blocks.items() if block.parent == key)
        return below or self.refs[self.blocks[key].slot] > 0

    def depth(self, key: bytes) -> int:
        block = self.blocks.get(key)
        return 0 if block is None else 1 + self.depth(block.parent)

    def tick(self) -> None:
        self.now += 1
        for key, block in self.blocks.items():
            if self.busy(key):
                block.used = self.now

    def order(self) -> list[bytes]:
        """Eviction order. Blocks whose use ended in the same call: deepest first."""
        idle = [key for key in self.blocks if not self.busy(key)]
        return sorted(idle, key=lambda key: (self.blocks[key].used, -self.depth(key)))

    def ancestors(self, key: bytes) -> set[bytes]:
        found: set[bytes] = set()
        while key in self.blocks:
            found.add(key)
            key = self.blocks[key].parent
        return found | {key}


class SlotPoolMachine(RuleBasedStateMachine):
    policy: EvictionName = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS, eviction_policy(self.policy, SLOTS, 4.0))
        self.model = NaivePool()
        self.generations = [self.pool.generation(slot) for slot in range(SLOTS)]

    def freed(self, slot: int) -> None:
        del self.model.refs[slot]
        self.model.private.discard(slot)
        self.model.removed.discard(slot)
        assert self.pool.generation(slot) > self.generations[slot]
        self.generations[slot] = self.pool.generation(slot)

    @rule(count=st.integers(0, SLOTS + 1))
    def reserve(self, count: int) -> None:
        order = self.model.order()
        free = SLOTS - len(self.model.refs)
        slots = self.pool.reserve(count)
        evicted = self.pool.drain_evicted()
        if count > free + len(order):
            assert slots is None
            assert not evicted
            return
        assert slots is not None
        assert len(set(slots)) == count
        assert len(evicted) == max(0, count - free)
        if self.policy == "lru":
            assert [gone.key for gone in evicted] == order[: len(evicted)]
        for gone in evicted:
            assert not self.model.busy(gone.key)
            assert all(block.parent != gone.key for block in self.model.blocks.values())
            block = self.model.blocks.pop(gone.key)
            assert (gone.slot, gone.parent, gone.generation) == (block.slot, block.parent, self.generations[gone.slot])
            self.freed(gone.slot)
        for slot in slots:
            assert slot not in self.model.refs
            self.model.refs[slot] = 1
            self.model.private.add(slot)

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 2))
    def claim(self, slot: int, count: int) -> None:
        assert self.pool.claim(slot, count) == (slot not in self.model.refs)
        if slot not in self.model.refs:
            self.model.refs[slot] = count
            self.model.private.add(slot)

    @precondition(lambda self: self.model.private)
    @rule(data=st.data(), key=st.sampled_from(NAMES), parent=st.sampled_from([b"", *NAMES]))
    def commit(self, data: st.DataObject, key: bytes, parent: bytes) -> None:
        slot = data.draw(st.sampled_from(sorted(self.model.private)))
        if key in self.model.blocks:
            assert self.pool.commit(slot, key, parent) == "duplicate"
            return
        if key in self.model.ancestors(parent):
            try:
                self.pool.commit(slot, key, parent)
            except InvalidInput:
                return
            raise AssertionError("a block became its own ancestor")
        assert self.pool.commit(slot, key, parent) == "published"
        self.model.private.discard(slot)
        self.model.blocks[key] = Block(slot, parent, 0)
        self.model.tick()

    @rule(keys=st.lists(st.sampled_from(NAMES), max_size=4))
    def acquire(self, keys: list[bytes]) -> None:
        run = []
        for key in keys:
            if key not in self.model.blocks:
                break
            run.append(self.model.blocks[key].slot)
        assert self.pool.match(keys) == run
        assert self.pool.acquire(keys) == run
        for slot in run:
            self.model.refs[slot] += 1
        self.model.tick()

    @rule(keys=st.lists(st.sampled_from(NAMES), max_size=4), strength=st.integers(0, 3))
    def favour(self, keys: list[bytes], strength: int) -> None:
        assert self.pool.favour(keys, strength) == sum(key in self.model.blocks for key in keys)

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 2))
    def ref(self, slot: int, count: int) -> None:
        try:
            self.pool.ref(slot, count)
        except InvariantBroken:
            assert slot not in self.model.refs
            return
        self.model.refs[slot] += count
        self.model.tick()

    @rule(slot=st.integers(0, SLOTS - 1), count=st.integers(1, 2))
    def unref(self, slot: int, count: int) -> None:
        try:
            free = self.pool.unref(slot, count)
        except InvariantBroken:
            assert self.model.refs.get(slot, 0) < count
            return
        self.model.tick()
        self.model.refs[slot] -= count
        assert free == (self.model.refs[slot] == 0 and slot in self.model.private | self.model.removed)
        if free:
            self.freed(slot)

    @rule(key=st.sampled_from(NAMES))
    def remove(self, key: bytes) -> None:
        slot = self.pool.remove(key)
        block = self.model.blocks.get(key)
        assert slot == (None if block is None else block.slot)
        if block is None:
            return
        self.model.tick()
        del self.model.blocks[key]
        self.model.removed.add(block.slot)
        if self.model.refs[block.slot] == 0:
            self.freed(block.slot)

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.free == SLOTS - len(self.model.refs)
        assert self.pool.evictable == len(self.model.order())
        assert {block.key: block.slot for block in self.pool.residents()} == {
            key: block.slot for key, block in self.model.blocks.items()
        }
        for slot in range(SLOTS):
            assert self.pool.refs(slot) == self.model.refs.get(slot, 0)
            assert (self.pool.state(slot) is State.RESERVED) == (slot in self.model.private)
            assert (self.pool.state(slot) is State.REMOVED) == (slot in self.model.removed)


class S3FifoMachine(SlotPoolMachine):
    policy = "s3fifo"


class CostMachine(SlotPoolMachine):
    policy = "cost"


SlotPoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
S3FifoMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
CostMachine.TestCase.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
TestSlotPool = SlotPoolMachine.TestCase
TestSlotPoolS3Fifo = S3FifoMachine.TestCase
TestSlotPoolCost = CostMachine.TestCase
