from __future__ import annotations

import json

import pytest

from anabranch.core.errors import AnabranchError, DeadlineExceeded, Overloaded, RequestError, Unavailable
from anabranch.serving.replay import TurnResult, plan_replay, summarize
from anabranch.serving.served import Stream, error_of, reuse_line, seconds
from anabranch.traces.live.files import read_trace

USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 64},
    "anabranch": {"computed": 36, "dram": 32, "ssd": 32, "peer": 0},
}


def event(**body: object) -> str:
    return "data: " + json.dumps(body)


def test_times_and_tiers_of_a_chat_stream() -> None:
    stream = Stream(10.0)
    assert stream.feed(event(choices=[{"delta": {"role": "assistant", "content": ""}}]), 10.1) == ""
    assert stream.feed("", 10.2) == ""
    assert stream.feed(": comment", 10.2) == ""
    assert stream.feed(event(choices=[{"delta": {"content": "He"}}]), 10.5) == "He"
    assert stream.feed(event(choices=[{"delta": {"content": "llo"}, "finish_reason": "stop"}]), 11.1) == "llo"
    stream.feed(event(choices=[], usage=USAGE), 11.5)
    stream.feed("data: [DONE]", 11.6)
    served = stream.served()
    assert (served.text, served.finish, served.output_tokens) == ("Hello", "stop", 4)
    assert (served.ttft_s, served.total_s) == (pytest.approx(0.5), pytest.approx(1.1))
    assert served.tpot_s == pytest.approx(0.6 / 3)
    assert (served.cached_tokens, served.computed_tokens) == (64, 36)
    assert served.tiers == {"dram": 32, "ssd": 32, "peer": 0}
    assert reuse_line(served) == "reused 64 (32 dram, 32 ssd) · computed 36 · TTFT 500 ms · 5.0 tokens/s"


def test_a_server_without_usage_is_counted_by_events() -> None:
    stream = Stream(0.0)
    stream.feed(event(choices=[{"text": "a"}]), 1.0)
    stream.feed("data: [DONE]", 1.0)
    served = stream.served()
    assert (served.output_tokens, served.tpot_s, served.tiers, served.prompt_tokens) == (1, None, {}, 0)


def test_broken_streams() -> None:
    with pytest.raises(Unavailable, match="in the middle"):
        Stream(0.0).served()
    for line in ("data: {", "data: 5"):
        with pytest.raises(Unavailable, match="no event"):
            Stream(0.0).feed(line, 0.0)
    with pytest.raises(Unavailable, match="engine died"):
        Stream(0.0).feed(event(error={"message": "engine died"}), 0.0)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RequestError), (404, RequestError), (429, Overloaded), (503, Unavailable), (504, DeadlineExceeded)],
)
def test_refusals_keep_the_servers_words(status: int, kind: type[AnabranchError]) -> None:
    error = error_of({"error": {"message": "no", "code": "why"}}, status, 3.0)
    assert type(error) is kind
    assert str(error) == "no"
    assert f"status {status}" in str(error_of(None, status))
    assert str(error_of({"error": "plain"}, status)) == "plain"
    if isinstance(error, Overloaded):
        assert error.retry_after_s == 3.0


def test_seconds() -> None:
    assert (seconds(0.0714), seconds(2.5)) == ("71 ms", "2.50 s")


def test_a_summary_without_answers_has_no_figures() -> None:
    failed = TurnResult(session="s", agent="main", turn=0, prompt_tokens=10, ideal_tokens=0, error="gone")
    summary = summarize([failed, failed], 0.0, 16)
    assert (summary.turns, summary.failed, summary.ttft_s.p50, summary.cached_share) == (0, 2, None, 0.0)
    assert summary.errors == {"gone": 2}


def test_missed_blocks() -> None:
    def result(ideal: int, cached: int, turn: int) -> TurnResult:
        return TurnResult(
            session="s",
            agent="main",
            turn=turn,
            prompt_tokens=100,
            ideal_tokens=ideal,
            cached_tokens=cached,
            ttft_s=1.0,
        )

    summary = summarize([result(0, 0, 0), result(96, 80, 1), result(96, 32, 2), result(0, 96, 3)], 2.0, 16)
    assert (summary.short_turns, summary.worst_missed_blocks) == (1, 4.0)
    assert (summary.first_ttft_s.count, summary.later_ttft_s.count) == (1, 3)
    assert (summary.cached_share, summary.ideal_share) == (pytest.approx(0.52), pytest.approx(0.48))


def test_a_plan_takes_the_first_sessions_and_turns() -> None:
    requests, _ = read_trace("")
    plan = plan_replay(requests, sessions=3, turns=5, context=1000, max_output=10, vocabulary=range(50, 60), seed=1)
    assert [len(session) for session in plan.sessions] == [5, 5, 5]
    assert plan.turns == 15
    assert set(plan.prompt(plan.sessions[0][0])) <= set(range(50, 60))
