"""What each eviction policy promises, through the pool that runs it."""

from __future__ import annotations

import random

import pytest

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.paging.pool import SlotPool
from anabranch.policy.eviction.choice import EVICTION_NAMES, EvictionName, eviction_policy
from anabranch.policy.eviction.contract import Block
from anabranch.policy.eviction.cost import KEYS_REMEMBERED, CostAware
from anabranch.policy.eviction.duel import FORGOTTEN_AFTER, SLOTS_AT_MOST, Duel
from anabranch.policy.eviction.lru import Lru
from anabranch.policy.eviction.prompts import OPEN, Prompt, Prompts
from anabranch.policy.eviction.reuse import BUCKETS, KINDS, ReuseStatistics, age_bucket, kind_of, traits_of
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


def test_cost_aware_begins_as_lru() -> None:
    """While nothing came back, the victims are LRU's."""

    def victims(name: EvictionName) -> list[bytes]:
        pool = pool_of(name, 60)
        for number in range(12):
            request(pool, chain(f"p{number}", 10))
        return [evicted.key for evicted in pool.drain_evicted()]

    assert victims("cost") == victims("lru") != []


def test_cost_aware_evicts_a_prefix_from_its_end_and_only_while_it_is_worth_least() -> None:
    """Blocks that returned often share a prefix with blocks that never did: the end goes, the shared part stays."""
    pool = pool_of("cost", 200)
    for number in range(400):
        request(pool, [*chain("shared", 20), *chain(f"own{number}", 30)])
        request(pool, chain(f"once{number}", 60))
        if number > 100:
            assert len(pool.match(chain("shared", 20))) == 20
    pool.check()


def test_what_is_remembered_is_bounded() -> None:
    cost, s3fifo = CostAware(20, 64.0), S3Fifo(20)
    for policy in (cost, s3fifo):
        pool = SlotPool(20, policy)
        for number in range(400):
            request(pool, chain(f"p{number if number % 3 else 0}", 10))
    assert len(cost._remembered) == 20 * KEYS_REMEMBERED
    assert len(cost._waiting) <= 20 * (1 + KEYS_REMEMBERED)
    assert 15 <= len(s3fifo._ghosts) <= 20


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
    """One kind comes back after about 1,000 blocks, always; another once in a hundred; a third was never seen."""
    regularly, rarely, unknown = kind_of(3, 2, 2), kind_of(5, 4, 0), kind_of(9, 1, 1)
    reuse = ReuseStatistics()
    before = reuse.worth[unknown]
    assert before[4:] == sorted(before[4:], reverse=True)  # without evidence: recency
    for number in range(1000):
        reuse.returned(regularly, 1000)
        if number % 100:
            reuse.forgotten(rarely, 100_000)
        else:
            reuse.returned(rarely, 1000)
    reuse.refresh([])
    regular, rare, never_seen = (reuse.worth[kind] for kind in (regularly, rarely, unknown))
    due = age_bucket(1000)
    assert regular[due] > regular[age_bucket(500)] > regular[0]  # the closer to the expected return, the more worth
    assert all(regular[bucket] > 5 * rare[bucket] for bucket in range(10, due + 1))
    assert rare[due] < never_seen[due] < regular[due]
    assert age_bucket(1 << 40) == BUCKETS - 1


def test_what_still_waits_is_evidence_up_to_its_age_only() -> None:
    """Blocks that wait since 100 blocks were not back after 10, and say nothing about what happens after 1,000."""
    kind = kind_of(0, 0, 0)
    worths = []
    for waiting in ([], [(kind, 100)] * 1000):
        reuse = ReuseStatistics()
        for _ in range(100):
            reuse.returned(kind, 10)
            reuse.returned(kind, 1000)
        reuse.refresh(waiting)
        worths.append(reuse.worth[kind])
    due = age_bucket(1000)
    assert worths[1][due] == pytest.approx(worths[0][due], rel=0.02)
    assert worths[1][age_bucket(10)] < worths[0][age_bucket(10)] / 2


def test_little_evidence_on_a_kind_borrows_from_its_traits() -> None:
    """Blocks used before come back, at two paces; a third pace with the same trait was seen once, without result."""
    reuse = ReuseStatistics()
    for pace in (2, 3):
        for _ in range(200):
            reuse.returned(kind_of(pace, 1, 3), 100)
            reuse.forgotten(kind_of(pace, 1, 0), 1000)
    for uses in (0, 3):
        reuse.forgotten(kind_of(4, 1, uses), 1000)
    reuse.refresh([])
    assert reuse.worth[kind_of(4, 1, 3)][10] > 5 * reuse.worth[kind_of(4, 1, 0)][10]
    assert {kind_of(*traits_of(kind)) for kind in range(KINDS)} == set(range(KINDS))


def test_faded_evidence_weighs_half() -> None:
    reuse = ReuseStatistics()
    for _ in range(64):
        reuse.returned(7, 10)
    reuse.fade()
    for _ in range(64):
        reuse.forgotten(7, 10)
    reuse.refresh([])
    faded = reuse.worth[7][age_bucket(10)]
    equal = ReuseStatistics()
    for _ in range(64):
        equal.returned(7, 10)
        equal.forgotten(7, 10)
    equal.refresh([])
    assert faded < equal.worth[7][age_bucket(10)]


class Plain:
    """A block outside any pool."""

    def __init__(self, key: bytes, depth: int) -> None:
        self.key, self.depth, self.used, self.tag, self.mark = key, depth, 0, 0, 0


def plain(name: str, blocks: int) -> list[Block]:
    return [Plain(key, depth) for depth, key in enumerate(chain(name, blocks))]


def test_prompts_are_put_together_though_they_come_in_pieces() -> None:
    ended: list[Prompt] = []
    prompts = Prompts(ended.append)
    a, b = plain("a", 6), plain("b", 4)
    for block in a[:3]:
        prompts.reused(block)
    for place, block in enumerate(b):  # a prompt of its own, in between
        prompts.inserted(block, b[place - 1] if place else None, fresh=True)
    prompts.inserted(a[3], a[2], fresh=False)  # remembered
    prompts.inserted(a[4], a[3], fresh=True)
    prompts.left(a[2])  # no end of a prompt
    assert ended == []
    prompts.left(b[3])
    prompts.left(a[4])
    assert [(prompt.blocks, prompt.fresh, prompt.clock) for prompt in ended] == [(b, 4, 7), (a[:5], 1, 9)]


def test_prompts_whose_end_is_never_left_end_anyway() -> None:
    ended: list[Prompt] = []
    prompts = Prompts(ended.append)
    for number in range(OPEN + 10):
        prompts.inserted(Plain(b"%d" % number, 0), None, fresh=True)
    assert [prompt.blocks[0].key for prompt in ended] == [b"%d" % number for number in range(9)]
    again = Plain(b"40", 0)
    prompts.reused(again)
    prompts.reused(Plain(b"other", 0))
    assert ended[-1].blocks[0].key == b"40"
    assert ended[-1].blocks[0] is not again


def test_the_duel_goes_to_who_has_more_hits_and_a_tie_to_lru() -> None:
    """Names of kind 1 come back after more one-off names than fit: worth keeps them, recency does not."""
    duel = Duel(64)
    worths = [[1.0] * BUCKETS, [2.0] * BUCKETS]
    clock = 0

    def asked(names: list[bytes], kind: int) -> None:
        nonlocal clock
        clock += len(names)
        duel.asked([(name, kind) for name in names], len(names), clock, worths)

    for number in range(20):
        asked(chain("kept", 16), 1)
        assert duel.worth_leads == (number > 0)
        asked(chain(f"once{number}", 64), 0)
    for number in range(20 * FORGOTTEN_AFTER):  # what once led is forgotten
        asked(chain(f"more{number}", 64), 0)
    assert not duel.worth_leads
    assert len(duel._worthy) == len(duel._recent) == 64


def test_the_duel_draws_a_bounded_share() -> None:
    for slots in (1, 100, 5000, 1 << 24):
        duel = Duel(slots)
        drawn = sum(duel.drawn(key) for key in chain("x", 4000))
        assert duel.slots <= SLOTS_AT_MOST
        assert drawn == pytest.approx(4000 * duel.slots / slots, rel=0.3, abs=20)


def test_impossible_settings_are_refused() -> None:
    for policy in (lambda: CostAware(0, 1.0), lambda: CostAware(1, 0.0), lambda: S3Fifo(0)):
        with pytest.raises(InvalidInput):
            policy()
    assert NodeConfig().eviction in EVICTION_NAMES
