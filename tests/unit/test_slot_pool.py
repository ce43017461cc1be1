"""One test per promise of SlotPool; the state machine in tests/property covers their interplay."""

from __future__ import annotations

import random

import pytest

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.paging.allocator import SlotAllocator
from anabranch.paging.pool import Evicted, SlotPool, State


def name(*path: int) -> bytes:
    return b"/".join(b"%d" % part for part in path)


def put_chain(pool: SlotPool, keys: list[bytes], parent: bytes = b"") -> list[int]:
    """Commit a chain and leave it cached."""
    slots = pool.reserve(len(keys))
    assert slots is not None
    for slot, key in zip(slots, keys, strict=True):
        assert pool.commit(slot, key, parent) == "published"
        parent = key
    for slot in slots:
        assert pool.unref(slot) is False
    return slots


def evict(pool: SlotPool, count: int) -> list[bytes]:
    slots = pool.reserve(pool.free + count)
    assert slots is not None
    for slot in slots:
        assert pool.unref(slot) is True
    return [gone.key for gone in pool.drain_evicted()]


def test_a_slot_goes_through_its_states() -> None:
    pool = SlotPool(2)
    assert (pool.free, pool.evictable, pool.resident, pool.slots) == (2, 0, 0, 2)
    (slot,) = pool.reserve(1) or []
    assert (pool.state(slot), pool.refs(slot), pool.key(slot)) == (State.RESERVED, 1, None)
    assert pool.commit(slot, b"a", b"") == "published"
    assert (pool.state(slot), pool.key(slot), pool.get(b"a")) == (State.COMMITTED, b"a", slot)
    assert pool.evictable == 0
    assert pool.unref(slot) is False
    assert (pool.free, pool.evictable) == (1, 1)
    assert pool.residents()[0].key == b"a"
    generation = pool.generation(slot)
    assert evict(pool, 1) == [b"a"]
    assert pool.get(b"a") is None
    assert pool.generation(slot) > generation
    pool.check()


def test_a_name_is_visible_only_after_commit_and_to_the_first_committer() -> None:
    pool = SlotPool(3)
    one, other, _ = pool.reserve(3) or []
    assert pool.match([b"a"]) == []
    assert pool.commit(one, b"a", b"") == "published"
    assert pool.commit(other, b"a", b"") == "duplicate"
    assert pool.get(b"a") == one
    assert pool.state(other) is State.RESERVED
    assert pool.unref(other) is True
    with pytest.raises(InvariantBroken, match="RESERVED"):
        pool.commit(one, b"b", b"")
    with pytest.raises(InvariantBroken, match="RESERVED"):
        pool.commit(other, b"b", b"")


def test_match_stops_at_the_first_hole_and_protects_nothing() -> None:
    pool = SlotPool(4)
    slots = put_chain(pool, [b"a", b"b", b"c"])
    put_chain(pool, [b"x"])
    for _ in range(10):
        assert pool.match([b"a", b"b", b"?", b"c"]) == slots[:2]
    assert pool.match([b"?", b"a"]) == []
    assert evict(pool, 4) == [b"c", b"b", b"a", b"x"]


def test_acquire_references_the_run_and_renews_it() -> None:
    pool = SlotPool(3)
    slots = put_chain(pool, [b"a", b"b"])
    put_chain(pool, [b"x"])
    assert pool.acquire([b"a", b"b", b"c"]) == slots
    assert [pool.refs(slot) for slot in slots] == [1, 1]
    assert pool.reserve(2) is None
    for slot in slots:
        pool.unref(slot)
    assert evict(pool, 3) == [b"x", b"b", b"a"]


def test_reserve_takes_all_or_nothing() -> None:
    pool = SlotPool(4)
    put_chain(pool, [b"a", b"b"])
    held = pool.acquire([b"a"])
    assert pool.reserve(4) is None
    assert pool.drain_evicted() == []
    assert (pool.free, pool.evictable) == (2, 1)
    assert pool.reserve(0) == []
    generation = pool.generation(pool.match([b"a", b"b"])[1])
    slots = pool.reserve(3)
    assert slots is not None
    assert len({*slots, *held}) == 4
    gone = pool.drain_evicted()
    assert [(item.key, item.parent, item.generation) for item in gone] == [(b"b", b"a", generation)]
    assert isinstance(gone[0], Evicted)
    assert pool.drain_evicted() == []
    with pytest.raises(InvalidInput, match="-1"):
        pool.reserve(-1)


def test_children_go_before_parents_and_never_a_referenced_descendants_ancestor() -> None:
    pool = SlotPool(8)
    put_chain(pool, [b"a", b"b", b"c"])
    put_chain(pool, [b"b2", b"c2"], parent=b"a")
    leaf = pool.get(b"c2")
    assert leaf is not None
    pool.ref(leaf)
    assert pool.evictable == 2
    assert evict(pool, 2) == [b"c", b"b"]
    assert pool.reserve(pool.free + 1) is None
    pool.unref(leaf)
    assert pool.evictable == 3
    assert evict(pool, 3) == [b"c2", b"b2", b"a"]


def test_a_block_under_an_absent_parent_is_found_and_evicted_like_any_other() -> None:
    pool = SlotPool(4)
    (slot,) = put_chain(pool, [b"b"], parent=b"a")
    assert pool.get(b"b") == slot
    assert pool.evictable == 1
    put_chain(pool, [b"a"])  # the parent comes late and adopts it
    assert pool.match([b"a", b"b"]) == [pool.get(b"a"), slot]
    assert evict(pool, 2) == [b"b", b"a"]
    put_chain(pool, [b"b"], parent=b"a")
    assert evict(pool, 1) == [b"b"]
    assert (pool.free, pool.resident) == (4, 0)
    pool.check()


def test_an_adopted_block_that_is_referenced_protects_its_late_parent() -> None:
    pool = SlotPool(3)
    child, parent = pool.reserve(2) or []
    pool.commit(child, b"b", b"a")
    pool.commit(parent, b"a", b"")
    pool.unref(parent)
    assert pool.evictable == 0
    pool.unref(child)
    assert evict(pool, 2) == [b"b", b"a"]


def test_remove_frees_a_cached_block_now_and_a_referenced_one_later() -> None:
    pool = SlotPool(4)
    slots = put_chain(pool, [b"a", b"b", b"c"])
    assert pool.remove(b"?") is None
    pool.ref(slots[1])
    assert pool.remove(b"b") == slots[1]
    assert pool.match([b"a", b"b", b"c"]) == slots[:1]
    assert pool.state(slots[1]) is State.REMOVED
    assert pool.evictable == 2
    with pytest.raises(InvariantBroken, match="REMOVED"):
        pool.commit(slots[1], b"b", b"a")
    pool.ref(slots[1])
    assert pool.unref(slots[1], 2) is True
    assert pool.remove(b"a") == slots[0]
    assert pool.free == 3
    assert evict(pool, 1) == [b"c"]  # the orphan does not stay for ever
    pool.check()


def test_the_same_name_can_live_on_in_another_slot_after_removal() -> None:
    pool = SlotPool(3)
    (slot,) = put_chain(pool, [b"a"])
    pool.ref(slot)
    pool.remove(b"a")
    (again,) = put_chain(pool, [b"a"])
    assert again != slot
    assert pool.unref(slot) is True
    assert pool.get(b"a") == again
    pool.check()


def test_double_free_and_unknown_slots_raise() -> None:
    pool = SlotPool(2)
    (slot,) = pool.reserve(1) or []
    with pytest.raises(InvariantBroken, match="references"):
        pool.unref(slot, 2)
    assert pool.unref(slot) is True
    for call in (pool.unref, pool.ref):
        with pytest.raises(InvariantBroken):
            call(slot)
    for call in (pool.unref, pool.ref, pool.generation, pool.state, pool.refs, pool.key, pool.claim):
        for unknown in (-1, 2):
            with pytest.raises(InvariantBroken, match="outside"):
                call(unknown)
    (slot,) = pool.reserve(1) or []
    for count in (0, -1):
        with pytest.raises(InvariantBroken, match="at least 1"):
            pool.unref(slot, count)
        with pytest.raises(InvariantBroken, match="at least 1"):
            pool.ref(slot, count)
    with pytest.raises(InvalidInput, match="at least one"):
        SlotPool(0)


def test_a_block_cannot_be_its_own_ancestor() -> None:
    pool = SlotPool(4)
    put_chain(pool, [b"b", b"c"], parent=b"a")
    (slot,) = pool.reserve(1) or []
    for key, parent in ((b"a", b"c"), (b"x", b"x"), (b"", b"")):
        with pytest.raises(InvalidInput, match="parent"):
            pool.commit(slot, key, parent)
    pool.check()
    assert pool.commit(slot, b"a", b"") == "published"


def test_claim_takes_this_very_slot_if_it_is_free() -> None:
    pool = SlotPool(3)
    assert pool.claim(1, 2) is True
    assert pool.claim(1) is False
    assert sorted(pool.reserve(2) or []) == [0, 2]
    assert pool.commit(1, b"a", b"") == "published"
    assert pool.unref(1) is False
    assert pool.unref(1) is False
    assert pool.claim(1) is False
    pool.check()


def test_check_notices_broken_books() -> None:
    pool = SlotPool(2)
    put_chain(pool, [b"a", b"b"])
    pool._refs[0] = 1
    pool._states[0] = State.FREE
    with pytest.raises(InvariantBroken):
        pool.check()


def test_the_allocator_hands_out_each_slot_once() -> None:
    allocator = SlotAllocator(3)
    assert allocator.take_slot(1)
    assert not allocator.take_slot(1)
    assert {allocator.take(), allocator.take()} == {0, 2}
    with pytest.raises(InvariantBroken, match="empty"):
        allocator.take()
    allocator.give(1)
    with pytest.raises(InvariantBroken, match="twice"):
        allocator.give(1)
    assert (len(allocator), allocator.is_free(1), allocator.take()) == (1, True, 1)


@pytest.mark.parametrize("slots", [1_000, 20_000])
def test_the_cost_of_an_operation_does_not_grow_with_the_pool(slots: int) -> None:
    """Link steps per slot are counted, not timed: chains of 100 blocks are put, acquired, dropped and evicted."""
    pool = SlotPool(slots)
    rng = random.Random(1)
    chains = [[name(chain, block) for block in range(100)] for chain in range(2 * slots // 100)]
    touched = 0
    for _ in range(3):
        rng.shuffle(chains)
        for keys in chains:
            held = pool.acquire(keys)
            rest = pool.reserve(len(keys) - len(held))
            assert rest is not None
            for slot, key in zip(rest, keys[len(held) :], strict=True):
                pool.commit(slot, key, keys[keys.index(key) - 1] if key != keys[0] else b"")
            order = [*held, *rest]
            rng.shuffle(order)
            for slot in order:
                pool.unref(slot)
            touched += len(keys)
    assert pool._tree.steps <= 8 * touched
    pool.check()
