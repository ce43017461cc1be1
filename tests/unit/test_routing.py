"""Which engine serves a request, and when a request is turned away."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.core.errors import Overloaded
from anabranch.engine.messages import EngineHello, EngineLoad
from anabranch.policy.admission import Admission
from anabranch.policy.routing import EngineView, PrefixMap, Prompt, Route, RoutingSettings, choose
from anabranch.serving.fleet import Fleet

SETTINGS = RoutingSettings(block_tokens=16, local_tokens=32)


def keys(count: int, salt: bytes = b"") -> list[bytes]:
    return [salt + bytes((index >> 8, index & 255)) for index in range(count)]


def view(engine_id: str, role: str, backlog: float = 0.0, requests: int = 0, free: int = 1 << 30) -> EngineView:
    return EngineView(engine_id=engine_id, role=role, backlog=backlog, requests=requests, free_tokens=free)


def pick(views: list[EngineView], runs: dict[str, int], tokens: int = 1600, **kwargs: object) -> Route:
    route = choose(views, Prompt(tokens=tokens, answer_tokens=100), runs, SETTINGS, **kwargs)  # type: ignore[arg-type]
    assert route is not None
    return route


PAIR = [view("p0", "prefill"), view("p1", "prefill"), view("d0", "decode"), view("d1", "decode")]


def test_the_prefix_decides_between_idle_engines() -> None:
    route = pick(PAIR, {"p1": 50, "d1": 20})
    assert (route.prefill, route.decode, route.cached_tokens) == ("p1", "d1", 800)
    assert route.kind == "disaggregated"
    assert "800 of 1600" in route.reason


def test_s19_a_holder_loses_requests_once_its_queue_costs_more_than_computing() -> None:
    views = [view(f"p{index}", "prefill") for index in range(4)] + [view("d", "decode")]
    runs = {"p0": 100}
    uncached = pick(views, {}).price
    fetched = SETTINGS.fetch_cost * 1600
    for backlog, expected in ((0.9 * fetched, "p0"), (1.5 * uncached, "p1")):
        views[0] = view("p0", "prefill", backlog=backlog)
        assert pick(views, runs).prefill == expected


def test_s19_a_shared_prefix_spreads_and_no_engine_starves() -> None:
    """60 % of the requests share a prefix that one of four engines holds, with 20 queued there."""
    backlog = {"p0": 20 * 500.0, "p1": 0.0, "p2": 0.0, "p3": 0.0}
    prefixes = PrefixMap(1 << 16)
    shared = keys(60)
    prefixes.record("p0", shared)
    served: Counter[str] = Counter()
    for number in range(100):
        own = keys(40, salt=bytes((number,)))
        names = [*shared, *own] if number % 5 < 3 else keys(100, salt=bytes((number,)))
        views = [view(name, "prefill", backlog=load) for name, load in backlog.items()] + [view("d", "decode")]
        route = choose(views, Prompt(tokens=1601, keys=names), prefixes.longest(names), SETTINGS)
        assert route is not None
        assert route.prefill is not None
        if number == 0:
            assert route.prefill != "p0"
        backlog[route.prefill] += route.price
        prefixes.record(route.prefill, names)
        served[route.prefill] += 1
        backlog = {name: max(0.0, load - 400.0) for name, load in backlog.items()}
    assert len(prefixes.longest(shared)) >= 2
    assert min(served[name] for name in backlog) >= 10


@pytest.mark.parametrize(
    ("views", "runs", "tokens", "kind", "decode", "reason"),
    [
        ([view("b0", "both"), view("b1", "both")], {"b1": 50}, 1600, "colocated", "b1", "role both"),
        ([view("d0", "decode")], {}, 1600, "colocated", "d0", "no prefill"),
        ([view("p0", "prefill")], {}, 1600, "colocated", "p0", "no decode"),
        (PAIR, {"d1": 99}, 1600, "colocated", "d1", "only 16 tokens"),
        (PAIR, {}, 20, "colocated", "d0", "only 20 tokens"),
    ],
)
def test_one_engine_does_it_all(
    views: list[EngineView], runs: dict[str, int], tokens: int, kind: str, decode: str, reason: str
) -> None:
    route = pick(views, runs, tokens)
    assert (route.kind, route.decode) == (kind, decode)
    assert reason in route.reason


def test_a_single_token_needs_no_decode_engine() -> None:
    route = choose(PAIR, Prompt(tokens=1600, one_token=True), {}, SETTINGS)
    assert route is not None
    assert (route.decode, route.prefill) == ("p0", None)


def test_nobody_there() -> None:
    assert choose([], Prompt(tokens=5), {}, SETTINGS) is None


def test_an_engine_that_just_failed_serves_only_alone() -> None:
    assert pick(PAIR, {"p1": 50}, avoid={"p1"}).prefill == "p0"
    assert pick(PAIR, {}, avoid={"p0", "p1"}).prefill == "p0"
    assert pick(PAIR, {}, avoid={"d0"}).decode == "d1"


def test_decode_goes_where_there_is_room_and_less_to_do() -> None:
    views = [view("p", "prefill"), view("d0", "decode", requests=3, free=100), view("d1", "decode", requests=9)]
    assert pick(views, {"d0": 90}).decode == "d1"
    views = [view("p", "prefill"), view("d0", "decode", requests=3), view("d1", "decode", requests=1)]
    assert pick(views, {}).decode == "d1"
    views = [view("p", "prefill"), view("d0", "decode", requests=2), view("d1", "decode", requests=1)]
    assert pick(views, {"d0": 99}, tokens=4000).decode == "d0"


def test_prefix_map_is_bounded_and_forgets_ends_first() -> None:
    prefixes = PrefixMap(8)
    first, second = keys(5, b"a"), keys(5, b"b")
    prefixes.record("x", first)
    prefixes.record("y", second)
    assert len(prefixes) == 8
    assert prefixes.longest(second) == {"y": 5}
    assert prefixes.longest(first) == {"x": 3}
    prefixes.record("y", first[:2])
    assert prefixes.longest(first) == {"x": 3, "y": 2}
    prefixes.forget("x")
    assert prefixes.longest(first) == {"y": 2}


def test_admission_bounds_what_waits() -> None:
    admission = Admission(3)
    admission.admit(2)
    with pytest.raises(Overloaded) as caught:
        admission.admit(2)
    assert caught.value.retry_after_s >= 1.0
    assert admission.waiting == 2
    admission.admit(1)
    admission.leave(10.0, started=True)
    admission.leave(30.0, started=True)
    admission.leave(30.0, started=False)
    assert admission.waiting == 0
    admission.admit(3)
    assert admission.retry_after_s() == 30.0


def test_a_pause_of_the_clients_does_not_count_as_a_slow_queue() -> None:
    admission = Admission(100)
    for start in (0.0, 5000.0):
        admission.admit(100)
        for index in range(100):
            admission.leave(start + 0.01 * index + 1.0, started=True)
    admission.admit(100)
    assert admission.retry_after_s() == 1.0


def test_load_reports_tell_of_other_gateways_only() -> None:
    fleet = Fleet(SETTINGS)
    fleet.connected(
        EngineHello(engine_id="p", role="prefill", model="m", identity=b"", context_tokens=9, block_tokens=16, pid=1)
    )
    claims = [fleet.claim("p", 50.0) for _ in range(2)]

    def report(waiting: int) -> EngineView:
        load = EngineLoad(
            waiting=waiting, running=0, waiting_tokens=4000 * waiting, free_slots=10, total_slots=20, steps=1
        )
        fleet.loaded("p", load)
        return fleet.views()[0]

    own = report(2)
    assert (own.backlog, own.requests, own.free_tokens) == (100.0, 2, 0), "what waits takes the room that is free"
    shared = report(4)
    assert (shared.backlog, shared.requests) == (100.0 + 8000.0, 4)
    for claim in claims:
        fleet.release(claim)
        fleet.release(claim)
    assert (fleet.engines["p"].claimed_price, fleet.engines["p"].claimed_requests) == (0.0, 0)


def test_an_engine_without_its_node_looks_empty_and_is_left_alone() -> None:
    """It cannot reserve a page, so all of them are free: it would attract everything, and answer nothing."""
    fleet = Fleet(SETTINGS)

    def load(free_slots: int, *, store_ok: bool = True, waiting_tokens: int = 0) -> EngineLoad:
        return EngineLoad(
            waiting=0, running=1, waiting_tokens=waiting_tokens, free_slots=free_slots, total_slots=20, steps=1,
            store_ok=store_ok,
        )  # fmt: skip

    for name in ("b0", "b1"):
        fleet.connected(
            EngineHello(engine_id=name, role="both", model="m", identity=b"", context_tokens=9, block_tokens=16, pid=1)
        )
    prompt = Prompt(tokens=100)
    fleet.loaded("b0", load(0))
    fleet.loaded("b1", load(20))
    assert fleet.choose(prompt).decode == "b1"  # type: ignore[union-attr]
    fleet.loaded("b1", load(20, store_ok=False))
    assert fleet.choose(prompt).decode == "b0"  # type: ignore[union-attr]
    fleet.loaded("b0", load(0, store_ok=False))
    assert fleet.choose(prompt) is not None, "better late than never"
