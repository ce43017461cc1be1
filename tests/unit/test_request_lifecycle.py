"""One request's way through the engines, with a failure at every step."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.blocks.hashing import PrefixChain
from anabranch.core.errors import AnabranchError, DeadlineExceeded, Overloaded, RequestError, Unavailable
from anabranch.engine.messages import (
    Cancel,
    EngineHello,
    EngineLoad,
    Failed,
    Prefill,
    Prefilled,
    Prepare,
    Prepared,
    Start,
    Submit,
    TokenEvent,
)
from anabranch.engine.request import EngineRequest, FinishReason, SamplingParams, Usage
from anabranch.policy.routing import RoutingSettings
from anabranch.serving.actions import Action, Computed, Deliver, Ended, Routed, Send, Waits
from anabranch.serving.fleet import Fleet
from anabranch.serving.lifecycle import RequestLifecycle
from anabranch.transfer.api import Address, Ticket

PROMPT = list(range(100))
WAITS = Waits(engine_s=10.0, prepare_s=5.0, prefill_s=9.0, token_s=20.0)
TICKET = Ticket(handoff="h", secret=b"s", address=Address("h", 1), first=0, blocks=7, layers=1, deadline_s=8.0)


class Story:
    """A lifecycle with its fleet; collects what it was told to do."""

    def __init__(self, *engines: str, n: int = 1, retries: int = 2, **sampling: Any) -> None:
        self.fleet = Fleet(RoutingSettings(block_tokens=16))
        for name in engines:
            self.join(name)
        sampling.setdefault("max_tokens", 10)
        request = EngineRequest(
            request_id="r", tokens=PROMPT, sampling=SamplingParams(**sampling), n=n, deadline_s=100.0
        )
        chain = PrefixChain(bytes(32), bytes(32), 16)
        chain.extend(PROMPT)
        self.now = 0.0
        self.life = RequestLifecycle(request, chain, self.fleet, now=0.0, retries=retries, waits=WAITS)
        self.delivered: list[tuple[int, int]] = []
        self.usages: list[Usage] = []
        self.ended: Ended | None = None

    def join(self, name: str) -> None:
        role = {"p": "prefill", "d": "decode", "b": "both"}[name[0]]
        self.fleet.connected(
            EngineHello(engine_id=name, role=role, model="m", identity=b"", context_tokens=1000, block_tokens=16, pid=1)
        )

    def do(self, actions: list[Action]) -> list[tuple[str, Any]]:
        """Messages sent, as (engine, message)."""
        sent = []
        for action in actions:
            match action:
                case Send():
                    sent.append((action.engine_id, action.message))
                case Deliver():
                    self.delivered += [(event.index, event.token) for event in action.events]
                case Computed():
                    self.usages.append(action.usage)
                case Ended():
                    assert self.ended is None
                    self.ended = action
                case Routed():
                    pass
        if self.ended is not None:
            for state in self.fleet.engines.values():
                assert (state.claimed_requests, state.claimed_price) == (0, 0.0)
        return sent

    def start(self) -> list[tuple[str, Any]]:
        return self.do(self.life.start(self.now))

    def lose(self, name: str) -> list[tuple[str, Any]]:
        self.fleet.lost(name)
        return self.do(self.life.engine_lost(name, self.now))

    def prepared(self, engine: str = "d0") -> list[tuple[str, Any]]:
        message = Prepared(request_id=self.life.attempt_id, ticket=TICKET, cached=0)
        return self.do(self.life.message(engine, message, self.now))

    def prefilled(self, *first: int, engine: str = "p0", finish: FinishReason | None = None) -> list[tuple[str, Any]]:
        message = Prefilled(
            request_id=self.life.attempt_id,
            first=[self.event(index, token, finish) for index, token in enumerate(first)],
            usage=Usage(prompt=100, computed=100),
        )
        return self.do(self.life.message(engine, message, self.now))

    def event(
        self, index: int, token: int, finish: FinishReason | None = None, usage: Usage | None = None
    ) -> TokenEvent:
        return TokenEvent(request_id=self.life.attempt_id, index=index, token=token, finish=finish, usage=usage)

    def tokens(self, *tokens: int, engine: str = "d0", finish: FinishReason | None = None, index: int = 0) -> Any:
        last = len(tokens) - 1
        events = [self.event(index, token, finish if place == last else None) for place, token in enumerate(tokens)]
        return self.do(self.life.tokens(engine, events, self.now))

    def fail(self, engine: str, code: str = "unavailable", retryable: bool = True) -> list[tuple[str, Any]]:
        message = Failed(request_id=self.life.attempt_id, code=code, message="no", retryable=retryable)
        return self.do(self.life.message(engine, message, self.now))

    def tick(self, now: float) -> list[tuple[str, Any]]:
        self.now = now
        return self.do(self.life.tick(now))

    def to(self, phase: str) -> Story:
        """Bring a disaggregated request to a phase."""
        self.start()
        if phase in ("prefilling", "running", "generating"):
            self.prepared()
        if phase in ("running", "generating"):
            self.prefilled(7)
        if phase == "generating":
            self.tokens(8, 9)
        return self

    @property
    def error(self) -> AnabranchError | None:
        assert self.ended is not None
        return self.ended.error


def kinds(sent: list[tuple[str, Any]]) -> list[tuple[str, str]]:
    return [(engine, type(message).__name__) for engine, message in sent]


def test_disaggregated_from_beginning_to_end() -> None:
    story = Story("p0", "d0")
    ((engine, prepare),) = story.start()
    assert engine == "d0"
    assert isinstance(prepare, Prepare)
    assert prepare.request.request_id == "r/1"
    ((engine, prefill),) = story.prepared()
    assert (engine, prefill.ticket) == ("p0", TICKET)
    assert isinstance(prefill, Prefill)
    ((engine, start),) = story.prefilled(7)
    assert (engine, start) == ("d0", Start(request_id="r/1", first=[7]))
    assert story.tokens(8, 9) == []
    assert story.tokens(10, finish="stop") == []
    assert story.delivered == [(0, 7), (0, 8), (0, 9), (0, 10)]
    assert story.ended == Ended()
    assert story.usages == [Usage(prompt=100, computed=100)]
    assert story.life.phase == "ended"


def test_affinity_covers_the_answer_at_the_decode_engine_only() -> None:
    story = Story("p0", "d0").to("running")
    story.tokens(*range(20), finish="length")
    chain = PrefixChain(bytes(32), bytes(32), 16)
    chain.extend([*PROMPT, 7, *range(20)])
    assert story.fleet.prefixes.longest(chain.keys) == {"p0": 6, "d0": 7}


def test_colocated() -> None:
    story = Story("b0")
    ((engine, submit),) = story.start()
    assert (engine, type(submit)) == ("b0", Submit)
    story.do(story.life.tokens("b0", [story.event(0, 5, usage=Usage(prompt=100, computed=4, dram=96))], 0.0))
    assert story.fleet.engines["b0"].claimed_price == 0.0
    assert story.fleet.engines["b0"].claimed_requests == 1
    story.tokens(6, engine="b0", finish="length")
    assert story.ended == Ended()
    assert [usage.dram for usage in story.usages] == [96]


def test_a_first_token_that_ends_the_answer_releases_the_prepared_engine() -> None:
    story = Story("p0", "d0").to("prefilling")
    sent = story.prefilled(2, finish="stop")
    assert ("d0", "Cancel") in kinds(sent)
    assert ("d0", "Start") not in kinds(sent)
    assert story.ended == Ended()
    assert story.delivered == [(0, 2)]


@pytest.mark.parametrize("phase", ["preparing", "prefilling", "running", "generating"])
def test_cancel_reaches_every_engine_involved(phase: str) -> None:
    story = Story("p0", "d0").to(phase)
    sent = story.do(story.life.cancel())
    assert sorted(kinds(sent)) == [("d0", "Cancel"), ("p0", "Cancel")]
    assert all(message.request_id == "r/1" for _, message in sent)
    assert story.ended == Ended(cancelled=True)
    assert story.do(story.life.cancel()) == []
    assert story.tokens(1) == story.prepared() == story.prefilled(1) == story.fail("d0") == story.lose("d0") == []


@pytest.mark.parametrize("phase", ["preparing", "prefilling"])
@pytest.mark.parametrize("lost", ["p0", "d0"])
def test_an_engine_lost_before_the_first_token_means_another_try(phase: str, lost: str) -> None:
    story = Story("p0", "p1", "d0", "d1").to(phase)
    sent = story.lose(lost)
    other = "d0" if lost == "p0" else "p0"
    prepared_at = "d1" if lost == "d0" else "d0"
    assert kinds(sent) == [(other, "Cancel"), (prepared_at, "Prepare")]
    request = sent[-1][1].request
    assert (request.request_id, request.tokens) == ("r/2", PROMPT)
    story.prepared(prepared_at)
    story.prefilled(7, engine="p1" if lost == "p0" else "p0")
    story.tokens(8, engine=prepared_at, finish="stop")
    assert story.delivered == [(0, 7), (0, 8)]
    assert story.ended == Ended()


@pytest.mark.parametrize("step", ["preparing", "prefilling"])
def test_a_refusal_before_the_first_token_means_another_try(step: str) -> None:
    story = Story("p0", "p1", "d0", "d1").to(step)
    refuser = "d0" if step == "preparing" else "p0"
    sent = story.fail(refuser)
    assert (refuser, "Cancel") not in kinds(sent)
    (prepare,) = [(engine, message) for engine, message in sent if isinstance(message, Prepare)]
    assert prepare[0] == ("d1" if step == "preparing" else "d0")


def test_prefill_lost_after_prefilled_changes_nothing() -> None:
    story = Story("p0", "d0").to("running")
    assert story.lose("p0") == []
    story.tokens(8, finish="stop")
    assert story.ended == Ended()


def test_prefill_failing_late_is_ignored_once_decode_generates() -> None:
    story = Story("p0", "d0").to("generating")
    assert story.fail("p0") == []
    assert story.life.phase == "running"
    story = Story("p0", "d0").to("running")
    assert ("d0", "Cancel") in kinds(story.fail("p0"))


def test_one_choice_without_penalties_resumes_from_its_own_tokens() -> None:
    story = Story("p0", "d0", "d1", max_tokens=10, min_tokens=5, seed=3).to("generating")
    sent = story.lose("d0")
    ((engine, prepare),) = [(engine, message) for engine, message in sent if isinstance(message, Prepare)]
    assert engine == "d1"
    assert prepare.request.tokens == [*PROMPT, 7, 8, 9]
    assert prepare.request.sampling == SamplingParams(max_tokens=7, min_tokens=2, seed=3)
    assert prepare.request.n == 1
    story.prepared("d1")
    story.prefilled(10)
    story.tokens(11, engine="d1", finish="length")
    assert [token for _, token in story.delivered] == [7, 8, 9, 10, 11]
    assert len(story.usages) == 1
    assert story.ended == Ended()


@pytest.mark.parametrize(
    ("seen", "counted"),
    [
        (Usage(prompt=103, computed=7, dram=96), Usage(prompt=100, computed=4, dram=96)),
        (Usage(prompt=103, computed=1, dram=96, ssd=6), Usage(prompt=100, computed=0, dram=96, ssd=4)),
    ],
)
def test_the_usage_of_a_resumed_attempt_counts_prompt_tokens_only(seen: Usage, counted: Usage) -> None:
    story = Story("b0", "b1")
    story.start()
    story.tokens(7, 8, 9, engine="b0")
    story.lose("b0")
    event = story.event(0, 10, finish="length", usage=seen)
    story.do(story.life.tokens("b1", [event], 0.0))
    assert story.usages == [counted]


@pytest.mark.parametrize("sampling", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}, {"frequency_penalty": 1}])
def test_with_penalties_the_request_is_replayed_and_compared(sampling: dict[str, float]) -> None:
    story = Story("p0", "d0", "d1", **sampling).to("generating")
    sent = story.lose("d0")
    assert sent[-1][1].request.tokens == PROMPT
    story.prepared("d1")
    story.prefilled(7)
    story.tokens(8, 9, 10, engine="d1", finish="stop")
    assert [token for _, token in story.delivered] == [7, 8, 9, 10]
    assert story.ended == Ended()


def test_several_choices_are_replayed_and_a_difference_is_an_error() -> None:
    story = Story("b0", "b1", n=2)
    story.start()
    story.tokens(1, 2, engine="b0", index=0)
    story.tokens(5, engine="b0", index=1)
    story.lose("b0")
    story.tokens(1, engine="b1", index=0)
    story.tokens(5, 6, engine="b1", index=1, finish="stop")
    assert story.delivered == [(0, 1), (0, 2), (1, 5), (1, 6)]
    sent = story.tokens(3, engine="b1", index=0)
    assert kinds(sent) == [("b1", "Cancel")]
    assert isinstance(story.error, Unavailable)
    assert story.delivered == [(0, 1), (0, 2), (1, 5), (1, 6)]


def test_retries_are_bounded() -> None:
    story = Story("b0", "b1", "b2", "b3", retries=2)
    story.start()
    for name in ("b0", "b1"):
        story.lose(name)
        assert story.ended is None
    story.lose("b2")
    assert isinstance(story.error, Unavailable)
    assert "b2" in str(story.error)


def test_a_request_waits_for_an_engine_and_not_for_ever() -> None:
    story = Story()
    assert story.start() == []
    assert story.life.deadline == 10.0
    story.join("b0")
    assert kinds(story.start()) == [("b0", "Submit")]
    story.lose("b0")
    assert story.life.phase == "waiting"
    story.tick(9.9)
    assert story.ended is None
    story.tick(10.0)
    assert isinstance(story.error, Unavailable)


def test_a_lone_engine_that_refuses_twice_gets_a_pause() -> None:
    story = Story("b0")
    story.start()
    assert kinds(story.fail("b0")) == [("b0", "Submit")]
    assert story.fail("b0") == []
    assert story.life.deadline == 1.0
    assert story.tick(0.5) == []
    assert kinds(story.tick(1.0)) == [("b0", "Submit")]
    story.fail("b0")
    assert isinstance(story.error, Unavailable)


def test_overload_is_told_unless_another_engine_can_help() -> None:
    story = Story("b0", "b1")
    story.start()
    assert kinds(story.fail("b0", "overloaded")) == [("b1", "Submit")]
    story.fail("b1", "overloaded")
    assert isinstance(story.error, Overloaded)
    assert story.error.retry_after_s == 1.0


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("context_length_exceeded", RequestError),
        ("invalid_input", RequestError),
        ("deadline_exceeded", DeadlineExceeded),
        ("invariant_broken", AnabranchError),
    ],
)
def test_what_no_engine_can_serve_ends_at_once(code: str, kind: type[AnabranchError]) -> None:
    story = Story("p0", "p1", "d0", "d1").to("prefilling")
    assert kinds(story.fail("p0", code, retryable=False)) == [("d0", "Cancel")]
    assert type(story.error) is kind


@pytest.mark.parametrize(
    ("phase", "deadline", "stalled"), [("preparing", 5.0, "d0"), ("prefilling", 9.0, "p0"), ("generating", 20.0, "d0")]
)
def test_every_wait_has_a_deadline(phase: str, deadline: float, stalled: str) -> None:
    story = Story("p0", "p1", "d0", "d1").to(phase)
    assert story.life.deadline == deadline
    assert story.tick(deadline - 0.1) == []
    sent = story.tick(deadline)
    assert {("p0", "Cancel"), ("d0", "Cancel")} <= set(kinds(sent))
    (prepare,) = [engine for engine, message in sent if isinstance(message, Prepare)]
    assert prepare == ("d1" if stalled == "d0" else "d0")


@pytest.mark.parametrize(("phase", "waited", "engine"), [("preparing", 5.0, "d0"), ("prefilling", 9.0, "p0")])
def test_a_queue_at_an_engine_that_makes_steps_is_not_a_stall(phase: str, waited: float, engine: str) -> None:
    story = Story("p0", "p1", "d0", "d1").to(phase)
    for round_ in (1, 2, 3):
        load = EngineLoad(waiting=9, running=9, waiting_tokens=9, free_slots=9, total_slots=9, steps=7 * round_)
        story.fleet.loaded(engine, load)
        assert story.tick(waited * round_) == []
        assert story.life.phase == phase
    assert ("d0", "Cancel") in kinds(story.tick(waited * 4))


def test_the_whole_request_has_a_deadline() -> None:
    story = Story("b0", retries=100)
    story.start()
    for now in (15.0, 30.0, 45.0, 60.0, 75.0, 90.0):
        story.now = now
        story.tokens(1, engine="b0")
    assert kinds(story.tick(100.0)) == [("b0", "Cancel")]
    assert isinstance(story.error, DeadlineExceeded)


def test_engines_get_what_is_left_of_the_deadline() -> None:
    story = Story("p0", "d0")
    story.now = 30.0
    ((_, prepare),) = story.start()
    assert prepare.request.deadline_s == 70.0


def test_stale_messages_are_dropped() -> None:
    story = Story("p0", "d0", "d1").to("prefilling")
    stale = story.life.attempt_id
    story.lose("d0")
    for message in (
        Prepared(request_id=stale, ticket=TICKET, cached=0),
        Prefilled(request_id=stale, first=[], usage=Usage()),
        Failed(request_id=stale, code="x", message="", retryable=False),
    ):
        for engine in ("p0", "d0", "d1"):
            assert story.do(story.life.message(engine, message, 0.0)) == []
    assert story.life.phase == "preparing"


def test_a_choice_closed_by_a_stop_string_is_over() -> None:
    story = Story("b0", n=2)
    story.start()
    story.tokens(1, engine="b0", index=0)
    assert story.do(story.life.close_choice(0)) == []
    story.tokens(2, engine="b0", index=0)
    story.tokens(3, engine="b0", index=1)
    assert story.delivered == [(0, 1), (1, 3)]
    assert kinds(story.do(story.life.close_choice(1))) == [("b0", "Cancel")]
    assert story.ended == Ended()


def test_an_engine_that_gives_up_mid_answer_is_resumed() -> None:
    story = Story("b0", "b1")
    story.start()
    story.tokens(1, 2, engine="b0")
    sent = story.tokens(0, engine="b0", finish="cancelled")
    (submit,) = [message for _, message in sent if isinstance(message, Submit)]
    assert submit.request.tokens == [*PROMPT, 1, 2]
    assert story.delivered == [(0, 1), (0, 2)]


def test_a_draining_engine_gets_nothing_new() -> None:
    story = Story("b0", "b1")
    load = EngineLoad(waiting=0, running=0, waiting_tokens=0, free_slots=9, total_slots=9, steps=0, draining=True)
    story.fleet.loaded("b0", load)
    assert kinds(story.start()) == [("b1", "Submit")]


def test_cancel_after_the_engine_is_gone_sends_nothing() -> None:
    story = Story("b0")
    story.start()
    story.lose("b0")
    assert story.do(story.life.cancel()) == []
    assert story.ended == Ended(cancelled=True)
    assert Cancel not in [type(message) for _, message in story.start()]
