"""A shaped link in virtual time: its rate, its order, and that nobody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.transfer.classes import BURST_S, MINIMUM_SHARES, Shaper, TrafficClass

RATE = 100e6
SLICE = 512 << 10
LOAD, MIGRATE, MODEL = TrafficClass.LOAD, TrafficClass.MIGRATE, TrafficClass.MODEL


def run(backlog: dict[TrafficClass, list[int]], seconds: float = 1e9) -> list[tuple[float, TrafficClass, int]]:
    """Everything waits from time 0 on; (time, class, bytes) of each grant."""
    shaper: Shaper[tuple[TrafficClass, int]] = Shaper(RATE)
    for traffic, sizes in backlog.items():
        for size in sizes:
            shaper.ask(traffic, (traffic, size), size)
    now, log = 0.0, []
    while now <= seconds:
        log += [(now, traffic, size) for traffic, size in shaper.grant(now)]
        wake = shaper.wake_at(now)
        if wake is None:
            break
        assert wake > now
        now = wake
    return log


def sent(log: list[tuple[float, TrafficClass, int]], traffic: TrafficClass) -> int:
    return sum(size for _, cls, size in log if cls is traffic)


def test_a_load_has_the_link_and_the_migration_its_minimum() -> None:
    log = run({MIGRATE: [SLICE] * 600, LOAD: [SLICE] * 600}, seconds=1.0)
    total = sent(log, LOAD) + sent(log, MIGRATE)
    assert abs(total - RATE) <= RATE * BURST_S + SLICE
    assert sent(log, LOAD) >= 0.95 * total
    assert sent(log, MIGRATE) >= MINIMUM_SHARES[MIGRATE] * total - SLICE


def test_a_load_that_comes_into_a_running_migration_goes_next() -> None:
    shaper: Shaper[str] = Shaper(RATE)
    now = 0.0
    for i in range(1000):
        shaper.ask(MIGRATE, f"m{i}", SLICE)
    while now < 0.5:
        shaper.grant(now)
        now = shaper.wake_at(now) or now
    shaper.ask(LOAD, "load", SLICE)
    assert shaper.grant(now) == ["load"]
    assert now < 0.5 + SLICE / RATE * 1.01


def test_alone_every_class_has_the_whole_link() -> None:
    for traffic in TrafficClass:
        log = run({traffic: [SLICE] * 400}, seconds=1.0)
        assert abs(sent(log, traffic) - RATE) <= RATE * BURST_S + SLICE


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(TrafficClass), st.lists(st.integers(1, 4 * SLICE), min_size=20, max_size=80), min_size=1
    )
)
def test_rate_order_and_minimum_hold_for_any_sizes(backlog: dict[TrafficClass, list[int]]) -> None:
    log = run(backlog)
    assert {traffic: [size for _, cls, size in log if cls is traffic] for traffic in backlog} == backlog
    largest = max(size for _, _, size in log)
    so_far = 0
    for now, _, size in log:
        assert so_far <= RATE * (now + BURST_S) + 1  # a grant may overdraw by itself, never by others
        so_far += size
    for traffic, share in MINIMUM_SHARES.items():
        left = len(backlog.get(traffic, []))
        others = own = 0
        for _, cls, size in log:
            if not left:
                break
            own += size if cls is traffic else 0
            others += 0 if cls is traffic else size
            left -= cls is traffic
            # Whatever else is owed at the same time comes at most once before it.
            if share:
                assert own >= share * (own + others) - (2 + len(TrafficClass)) * largest


def test_the_highest_class_keeps_what_the_shares_leave() -> None:
    log = run({traffic: [SLICE] * 2000 for traffic in TrafficClass}, seconds=4.0)
    total = sum(size for _, _, size in log)
    assert sent(log, MODEL) >= 0.68 * total
    for traffic, share in MINIMUM_SHARES.items():
        assert sent(log, traffic) >= share * total - 2 * SLICE


def test_an_idle_class_saves_nothing_up() -> None:
    shaper: Shaper[str] = Shaper(RATE)
    for i in range(2000):
        shaper.ask(LOAD, f"l{i}", SLICE)
    now, late, order = 0.0, False, []
    while now < 3.0:
        if now >= 2.0 and not late:
            late = True
            for i in range(100):
                shaper.ask(MIGRATE, f"m{i}", SLICE)
        granted = shaper.grant(now)
        order += granted if late else []
        now = shaper.wake_at(now) or now
    migrated = sum(name.startswith("m") for name in order)
    assert 1 <= migrated <= len(order) * 0.02 + 1


def test_who_withdraws_is_not_granted() -> None:
    shaper: Shaper[str] = Shaper(RATE)
    assert shaper.take(10 * SLICE, 0.0)
    assert not shaper.take(1, 0.0)
    shaper.ask(LOAD, "a", SLICE)
    shaper.ask(LOAD, "b", SLICE)
    assert shaper.withdraw(LOAD, "a")
    assert not shaper.withdraw(LOAD, "a")
    assert shaper.head() == "b"
    assert shaper.grant(10.0) == ["b"]
    assert shaper.wake_at(10.0) is None
    assert shaper.waiting == 0
