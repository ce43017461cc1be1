"""What each eviction policy promises, through the pool that runs it."""

from __future__ import annotations

import random

import pytest

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.paging.pool import SlotPool
from anabranch.policy.eviction.choice import EVICTION_NAMES, EvictionName, eviction_policy
from anabranch.policy.eviction.contract import Block
from anabranch.policy.eviction.cost import KEYS_REMEMBERED, CostAware
from anabranch.policy.eviction.lru import Lru
from anabranch.policy.eviction.reuse import BUCKETS, ReuseStatistics, age_bucket
from anabranch.policy.eviction.s3fifo import S3Fifo
from anabranch.store.config import NodeConfig


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}/{number}".encode() for number in range(blocks)]


def request(pool: SlotPool, keys: list[bytes]) -> int:
    """Use a prompt as an engine does; returns how many of its blocks were resident."""
    held = pool.acquire(keys)
    fresh = pool.reserve(len(keys) - len(held))
    assert fresh is not None
    for place, slot in enumerate(fresh, len(held)):
        assert pool.commit(slot, keys[place], keys[place - 1] if place else b"") == "published"
    for slot in (*held, *fresh):
        pool.unref(slot)
    return len(held)


def pool_of(name: EvictionName, slots: int) -> SlotPool:
    return SlotPool(slots, eviction_policy(name, slots, 64.0))


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_equal_calls_give_equal_evictions_and_leave_sound_books(name: EvictionName) -> None:
    def evictions() -> list[bytes]:
        pool, rng = pool_of(name, 60), random.Random(3)
        gone: list[bytes] = []
        for _ in range(600):
            request(pool, chain(f"s{rng.randrange(30)}", rng.randrange(1, 12)))
            gone += [evicted.key for evicted in pool.drain_evicted()]
        pool.check()
        return gone

    first = evictions()
    assert len(first) > 500
    assert first == evictions()


@pytest.mark.parametrize("name", ["s3fifo", "cost"])
def test_one_off_prompts_do_not_flush_a_session(name: EvictionName) -> None:
    """Each turn of the session is followed by more one-off blocks than the pool holds."""

    def hits(policy: EvictionName) -> int:
        pool, found = pool_of(policy, 100), 0
        for turn in range(60):
            found += request(pool, chain("session", 20))
            for number in range(6):
                request(pool, chain(f"once-{turn}-{number}", 20))
        return found

    assert hits("lru") == 0
    assert hits(name) > 0.3 * 60 * 20


@pytest.mark.parametrize("name", EVICTION_NAMES)
def test_a_pool_that_is_one_prompt_still_serves_the_next(name: EvictionName) -> None:
    pool = pool_of(name, 10)
    for number in range(50):
        assert request(pool, chain(f"p{number}", 10)) == 0
    assert request(pool, chain("p49", 10)) == 10


def test_cost_aware_keeps_what_is_softly_pinned_for_a_while() -> None:
    pool = pool_of("cost", 40)
    request(pool, chain("pinned", 10))
    assert pool.favour([*chain("pinned", 10), b"absent"], 50) == 10
    for number in range(6):
        request(pool, chain(f"new{number}", 10))
    assert len(pool.match(chain("pinned", 10))) == 10
    for number in range(100):
        request(pool, chain(f"later{number}", 10))
    assert pool.match(chain("pinned", 10)) == []
    with pytest.raises(InvalidInput, match="at least 0"):
        pool.favour([], -1)


def test_soft_pins_yield_when_nothing_else_can_go() -> None:
    pool = pool_of("cost", 10)
    request(pool, chain("pinned", 10))
    pool.favour(chain("pinned", 10), 1000)
    assert request(pool, chain("other", 10)) == 0
    assert pool.match(chain("pinned", 10)) == []


def test_what_is_remembered_of_evicted_blocks_is_bounded() -> None:
    cost, s3fifo = CostAware(20, 64.0), S3Fifo(20)
    for policy in (cost, s3fifo):
        pool = SlotPool(20, policy)
        for number in range(200):
            request(pool, chain(f"p{number}", 10))
    assert len(cost._remembered) == 20 * KEYS_REMEMBERED
    assert len(s3fifo._ghosts) == 20


def test_a_pin_by_a_transfer_is_no_use() -> None:
    """S3-FIFO would keep a block that was used; write-back only references it."""
    pool = pool_of("s3fifo", 20)
    request(pool, chain("written", 10))
    for key in chain("written", 10):
        slot = pool.get(key)
        assert slot is not None
        pool.ref(slot)
        pool.unref(slot)
    request(pool, chain("other", 15))
    assert len(pool.match(chain("written", 10))) == 5


class Stubborn(Lru):
    """Names a block that it was told is no leaf."""

    first: Block | None = None

    def inserted(self, block: Block, parent: Block | None, now: int) -> None:
        self.first = self.first or block

    def victim(self, now: int) -> Block:
        return self.first or super().victim(now)


def test_a_policy_cannot_evict_what_is_no_leaf() -> None:
    pool = SlotPool(4, Stubborn())
    request(pool, chain("a", 3))
    with pytest.raises(InvariantBroken, match="no leaf"):
        pool.reserve(2)
    pool.check()
    assert pool.resident == 3


def test_worth_follows_the_best_horizon() -> None:
    """Class 0 comes back after about 1,000 insertions, always; class 1 once in a hundred; class 2 was never seen."""
    reuse = ReuseStatistics(3)
    for _ in range(100):
        for kind in (0, 1):
            reuse.used(kind)
        reuse.reused(0, 1000)
    reuse.reused(1, 1000)
    reuse.refresh()
    regular, rare, unknown = reuse.worth
    due = age_bucket(1000)
    assert regular[due] > regular[age_bucket(500)] > regular[0]  # the closer to the expected return, the more worth
    assert regular[due + 1] < regular[0] / 10  # what did not return when it should is worth little
    assert all(regular[bucket] > 5 * rare[bucket] for bucket in range(10, due + 1))
    assert unknown[4:] == sorted(unknown[4:], reverse=True)  # without evidence: recency
    assert age_bucket(1 << 40) == BUCKETS - 1


def test_impossible_settings_are_refused() -> None:
    for policy in (lambda: CostAware(0, 1.0), lambda: CostAware(1, 0.0), lambda: S3Fifo(0)):
        with pytest.raises(InvalidInput):
            policy()
    assert NodeConfig().eviction in EVICTION_NAMES
