"""Slices over rails of any speed: given once, done about as soon as possible, and failed rails are left."""

from __future__ import annotations

import heapq
import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.store.values.pace import LanePace
from anabranch.transfer.spread import FIRST_PAUSE_S, LONGEST_PAUSE_S, RailQueue, Spread

SLICE = 512 << 10
speeds = st.lists(st.floats(10e6, 10e9), min_size=1, max_size=6)


class Bench:
    """Rails that work one slice at a time, in virtual time; `speed[rail]` may be changed, 0 = it fails what it has."""

    def __init__(self, speed: list[float], guesses: list[float], count: int) -> None:
        self.speed = dict(enumerate(speed))
        self.spread = Spread(dict(enumerate(guesses)))
        self.queue: RailQueue[int, int] = RailQueue(self.spread, [(i, SLICE) for i in range(count)])
        self.now = 0.0
        self.given: list[tuple[float, int, int]] = []
        self.arrived: list[int] = []
        self._events: list[tuple[float, int, int | None, float]] = []

    def step(self) -> None:
        busy = {rail for _, rail, item, _ in self._events if item is not None}
        for rail in self.speed:
            if rail not in busy and (item := self.queue.next(rail, self.now)) is not None:
                self.given.append((self.now, rail, item))
                speed = self.speed[rail]
                end = self.now + (SLICE / speed if speed else 0.01)
                heapq.heappush(self._events, (end, rail, item, speed))
                busy.add(rail)
        if not busy:
            retry = self.spread.retry_at()
            assert retry is not None, "slices wait and nobody may take one"
            heapq.heappush(self._events, (max(retry, self.now), -1, None, 0.0))
        before = self.now
        self.now, rail, item, speed = heapq.heappop(self._events)
        if item is None:
            return
        if speed:
            assert self.queue.done(rail, item, SLICE / speed, self.now)
            self.arrived.append(item)
        else:
            assert self.queue.failed(rail, self.now) == [item]
        assert self.now >= before

    def run(self) -> float:
        while not self.queue.finished:
            self.step()
        return self.now


def soonest(speed: list[float], count: int) -> float:
    """When whole slices can be done at best."""
    ends = heapq.merge(*([n * SLICE / rate for n in range(1, count + 1)] for rate in speed))
    return next(itertools.islice(ends, count - 1, None))


@settings(max_examples=40, deadline=None)
@given(speeds, st.integers(1, 150), st.booleans())
@example([69006171.0, 210163946.0, 280012351.0, 832871568.0], 3, True)
def test_all_slices_once_and_nearly_as_soon_as_possible(speed: list[float], count: int, known: bool) -> None:
    guesses = speed if known else [0.0] * len(speed)
    bench = Bench(speed, guesses, count)
    end = bench.run()
    assert sorted(bench.arrived) == list(range(count))
    assert len(bench.given) == count
    if known:  # rails that finish at the same instant do not see each other do so
        assert end <= soonest(speed, count) + SLICE / max(speed) + 1e-9
    else:  # one slice of the slowest rail is the price of measuring it
        assert end <= 1.1 * soonest(speed, count) + SLICE / min(speed) + 1e-9


@settings(max_examples=40, deadline=None)
@given(speeds, st.integers(0, 2**32), st.integers(20, 80))
def test_failures_at_any_time_lose_and_repeat_nothing(speed: list[float], seed: int, count: int) -> None:
    draw = random.Random(seed)
    bench = Bench(speed, [0.0] * len(speed), count)
    for _ in range(10 * count):
        if bench.queue.finished:
            break
        rail = draw.randrange(len(speed))
        bench.speed[rail] = draw.choice([0.0, speed[rail], speed[rail], speed[rail]])
        bench.step()
    for rail, value in enumerate(speed):
        bench.speed[rail] = value
    bench.run()
    assert sorted(bench.arrived) == list(range(count))


def test_a_rail_that_becomes_ten_times_slower_sheds_load() -> None:
    bench = Bench([1e9, 1e9], [1e9, 1e9], 400)
    while len(bench.arrived) < 100:
        bench.step()
    first = sum(rail == 0 for _, rail, _ in bench.given)
    assert 45 <= first <= 56
    bench.speed[0] = 1e8
    mark = len(bench.given)
    bench.run()
    assert sum(rail == 0 for _, rail, _ in bench.given[mark:]) <= 300 / 11 + 4


def test_early_binding_sheds_too_even_before_the_slow_slice_is_done() -> None:
    spread = Spread({"a": 1e9, "b": 1e9})
    assert {spread.choose(SLICE, 0.0), spread.choose(SLICE, 0.0)} == {"a", "b"}
    spread.done("b", SLICE, SLICE / 1e9, 0.0005)
    late = 20 * SLICE / 1e9  # "a" should have been done long ago
    assert [spread.choose(SLICE, late) for _ in range(10)] == ["b"] * 10


@settings(max_examples=50, deadline=None)
@given(speeds)
def test_early_binding_finishes_like_the_ideal_with_known_speeds(speed: list[float]) -> None:
    spread = Spread(dict(enumerate(speed)))
    load = [0] * len(speed)
    for _ in range(200):
        rail = spread.choose(SLICE, 0.0)
        assert rail is not None
        load[rail] += SLICE
    end = max(bytes_ / rate for bytes_, rate in zip(load, speed, strict=True))
    assert end <= 200 * SLICE / sum(speed) + len(speed) * SLICE / sum(speed) + 1e-9


def test_a_failed_rail_gets_one_probe_after_growing_pauses() -> None:
    spread = Spread({"dead": 1e9, "good": 1e9})
    spread.failed("dead", 0.0)
    now, pauses, left_at = 0.0, [], 0.0
    while now < 200.0:
        chosen = spread.choose(SLICE, now)
        if chosen == "dead":
            pauses.append(now - left_at)
            for _ in range(5):  # until the probe ends it gets nothing more
                assert spread.choose(SLICE, now) == "good"
                assert not spread.take("dead", SLICE, now)
            spread.failed("dead", now)
            left_at = now
        else:
            assert chosen == "good"
            spread.done("good", SLICE, 0.001, now)
        now += 0.01
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.02)
    assert all(later >= sooner * 1.8 - 0.03 for sooner, later in itertools.pairwise(pauses) if later < 29)
    assert max(pauses) <= LONGEST_PAUSE_S + 0.02
    assert len(pauses) <= 16


def test_a_probe_that_arrives_brings_the_rail_back() -> None:
    spread = Spread({"only": 1e9})
    assert spread.choose(SLICE, 0.0) == "only"
    spread.failed("only", 1.0)
    spread.failed("only", 1.0)  # a second lane of the same rail
    assert spread.choose(SLICE, 1.05) is None
    assert spread.retry_at() == pytest.approx(1.0 + FIRST_PAUSE_S)
    assert spread.choose(SLICE, 1.1) == "only"
    assert spread.retry_at() is None
    spread.done("only", SLICE, 0.001, 1.2)
    assert spread.in_use() == ["only"]
    assert spread.choose(SLICE, 1.2) == "only"


def test_a_slow_rail_is_measured_again_after_a_while() -> None:
    spread = Spread({"slow": 0.0, "fast": 1e9})
    assert spread.choose(SLICE, 0.0) == "slow"  # unknown: as good as the best
    spread.done("slow", SLICE, 60.0, 60.0)
    assert spread.choose(SLICE, 60.1) == "fast"
    spread.done("fast", SLICE, 0.0005, 60.2)
    spread.choose(SLICE, 75.0)
    assert spread.choose(SLICE, 75.0) in ("slow", "fast")
    assert spread.backlog("slow") == SLICE


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(20e6, 4e9), min_size=2, max_size=4), st.integers(8, 100), st.integers(0, 3))
def test_lanes_of_a_transfer_leave_the_end_to_the_fast_ones(speed: list[float], count: int, own: int) -> None:
    """Three requests are under way on each lane; the caller's lane (`own`) never idles, the others may leave."""
    pace, own = LanePace(), own % len(speed)
    lanes: dict[int, int] = dict.fromkeys(range(len(speed)), 0)  # lane → under way
    waiting, done, now = count, 0, 0.0
    ends: list[tuple[float, int]] = []
    while done < count:
        for lane in list(lanes):
            while lanes[lane] < 3 and waiting:
                if (lane != own or lanes[lane]) and not pace.worth(lane, waiting, now):
                    break
                pace.given(lane, now)
                waiting -= 1
                lanes[lane] += 1
                if lanes[lane] == 1:
                    heapq.heappush(ends, (now + SLICE / speed[lane], lane))
            if lane != own and not lanes[lane]:
                pace.left(lane)
                del lanes[lane]
        now, lane = heapq.heappop(ends)
        pace.arrived(lane, now)
        done += 1
        lanes[lane] -= 1
        if lanes[lane]:
            heapq.heappush(ends, (now + SLICE / speed[lane], lane))
    # What a lane has taken before it was measured (three), or as the caller's, it must do.
    assert now <= 1.1 * soonest(speed, count) + 4 * SLICE / min(speed) + 1e-9
    if count > 20 * len(speed) * max(speed) / min(speed):
        assert now <= 1.1 * soonest(speed, count) + SLICE / speed[own] + 1e-9
