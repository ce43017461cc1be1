"""The scheduler, step by step: admission, chunks, decode, forks, preemption, ends."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_script import BLOCK, Script, keys, request

from anabranch.core.errors import InvariantBroken
from anabranch.engine.actions import Acquire, CancelLoad, Reserve
from anabranch.engine.kv_port import Acquired, LayersReady, LoadEnded, PortBack, Reserved
from anabranch.engine.messages import Cancel, Drain, Failed, Submit
from anabranch.engine.request import EngineRequest, Usage
from anabranch.engine.runner import Sampled


def test_a_request_from_prompt_to_its_last_token() -> None:
    script = Script()
    script.submit("a", 10, max_tokens=3)
    acquire = script.acquired()
    assert acquire.keys == keys(range(10))[:2]
    assert script.reserved().count == 3
    step = script.plan()
    (chunk,) = step.chunks
    assert (chunk.start, chunk.tokens, chunk.sample, chunk.first_choice) == (0, list(range(10)), 1, 0)
    assert len(chunk.pages) == 3
    (event,) = script.finish(step, [501])
    assert (event.request_id, event.index, event.token, event.finish) == ("a", 0, 501, None)
    assert [(block.key, block.parent) for block in script.commits] == [
        (keys(range(10))[0], b""),
        (keys(range(10))[1], keys(range(10))[0]),
    ]
    assert [script.step([token])[0].finish for token in (502, 503)] == [None, "length"]
    script.idle()


def test_the_whole_prompt_in_cache_still_computes_the_last_block() -> None:
    script = Script()
    script.submit("a", 8)
    assert len(script.acquired(ready=1).keys) == 1
    script.reserved()
    step = script.plan()
    assert (step.chunks[0].start, step.chunks[0].tokens) == (4, [4, 5, 6, 7])
    script.finish(step)
    assert [block.key for block in script.commits] == [keys(range(8))[1]]


def test_prompts_are_cut_by_the_quota_and_share_steps_with_decode() -> None:
    script = Script(step_tokens=12)
    script.start("decoding", 5)
    script.step()
    script.start("long", 30)
    step = script.plan()
    decode, prefill = step.chunks
    assert (len(decode.tokens), decode.start, decode.sample) == (1, 5, 1)
    assert (prefill.start, len(prefill.tokens), prefill.sample) == (0, 8, 0)
    script.finish(step)
    starts = []
    while (chunk := (step := script.plan()).chunks[-1]).sample == 0:
        starts.append(chunk.start)
        script.finish(step)
        script.answer_all()
    assert starts == [8, 16]
    assert chunk.start + len(chunk.tokens) == 30


def test_generated_blocks_are_published_when_full() -> None:
    script = Script()
    script.start("a", 6, max_tokens=8)
    for token in range(600, 606):
        script.step([token])
    full = [*range(6), *range(600, 606)]
    assert [block.key for block in script.commits] == keys(full)[:2]
    script.step([606])
    assert [block.key for block in script.commits] == keys([*full, 606])[:3]
    assert [block.parent for block in script.commits] == [b"", *keys(full)[:2]]


def test_uncacheable_requests_neither_look_up_nor_publish() -> None:
    script = Script()
    script.tell(Submit(request=_uncacheable()))
    assert not any(isinstance(action, Acquire) for action in script.todo)
    script.answer_all()
    for _ in range(8):
        script.step()
    assert script.commits == []
    script.idle()


def _uncacheable() -> EngineRequest:
    return msgspec.structs.replace(request("u", 9), cacheable=False, root=b"")


def test_choices_share_the_prompt_and_copy_its_partial_page_once_each_but_the_last() -> None:
    script = Script()
    script.start("a", 6, n=3, max_tokens=4)
    step = script.plan()
    assert step.chunks[0].sample == 3
    events = script.finish(step, [501, 502, 503])
    assert [(event.index, event.token) for event in events] == [(0, 501), (1, 502), (2, 503)]
    script.answer_all()
    step = script.plan()
    shared = step.chunks[0].pages[0]
    assert [chunk.pages[0] for chunk in step.chunks] == [shared] * 3
    assert len({chunk.pages[1] for chunk in step.chunks}) == 3
    assert [(copy.tokens, copy.src) for copy in step.copies] == [(2, step.copies[0].src)] * 2
    assert step.copies[0].src == step.chunks[2].pages[1]
    assert [chunk.first_choice for chunk in step.chunks] == [0, 1, 2]
    script.finish(step)
    assert len(script.commits) == 1
    for _ in range(2):
        script.step()
    script.idle()


def test_usage_adds_up_by_origin() -> None:
    script = Script()
    script.submit("a", 22, max_tokens=1)
    acquire = script.acquired(ready=2, loading=3)
    script.reserved()
    script.tell(LoadEnded(op=acquire.op, usable=3, tiers=["ssd", "peer", "peer"]))
    (event,) = script.step()
    assert event.usage == Usage(prompt=22, computed=2, dram=8, ssd=4, peer=8)
    script.idle()


def test_chunks_start_once_the_first_layer_is_there_and_count_when_the_load_is_whole() -> None:
    script = Script()
    script.submit("a", 14, max_tokens=1)
    acquire = script.acquired(ready=1, loading=2)
    script.reserved()
    assert script.core.plan(0.0) is None
    script.tell(LayersReady(op=acquire.op, layers=1))
    step = script.plan()
    assert step.loads == [acquire.op]
    assert (step.chunks[0].start, len(step.chunks[0].tokens)) == (12, 2)
    assert script.finish(step, [501]) == []
    assert script.core.plan(0.0) is None
    script.tell(LoadEnded(op=acquire.op, usable=2, tiers=["peer", "peer"]))
    assert script.sent[-1].tokens[0].token == 501  # type: ignore[attr-defined]
    script.idle()


def test_a_load_that_falls_short_is_recomputed_from_the_usable_prefix() -> None:
    script = Script()
    script.start("other", 5, max_tokens=2)
    script.submit("a", 14, max_tokens=1)
    acquire = script.acquired(ready=1, loading=2)
    script.reserved()
    script.tell(LayersReady(op=acquire.op, layers=1))
    step = script.plan()
    assert [event.request_id for event in script.finish(step, [501, 502])] == ["other"]
    script.tell(LoadEnded(op=acquire.op, usable=1, tiers=["ssd"], reason="short read"))
    step = script.plan()
    again = next(chunk for chunk in step.chunks if chunk.start == 8)
    assert again.tokens == list(range(8, 14))
    events = {event.request_id: event for event in script.finish(step)}
    assert events["a"].usage == Usage(prompt=14, computed=6, dram=4, ssd=4)
    assert [block.key for block in script.commits][-1] == keys(range(14))[2]
    script.idle()


def test_decode_does_not_wait_for_the_load_of_another() -> None:
    script = Script()
    script.start("decoding", 5)
    script.step()
    script.submit("a", 14, max_tokens=1)
    acquire = script.acquired(ready=1, loading=2)
    script.reserved()
    script.tell(LayersReady(op=acquire.op, layers=1))
    step = script.plan()
    assert (step.loads, [chunk.start for chunk in step.chunks]) == ([], [5])
    script.finish(step)
    script.tell(LoadEnded(op=acquire.op, usable=2, tiers=["ssd", "ssd"]))
    assert [chunk.start for chunk in script.plan().chunks] == [6, 12]


def test_a_gate_that_gave_up_discards_the_result() -> None:
    script = Script()
    script.submit("a", 14, max_tokens=1)
    acquire = script.acquired(loading=3)
    script.reserved()
    script.tell(LayersReady(op=acquire.op, layers=1))
    assert script.finish(script.plan(), [501], broken=[acquire.op]) == []
    assert script.next(CancelLoad).op == acquire.op
    assert script.core.plan(0.0) is None
    script.tell(LoadEnded(op=acquire.op, usable=3, tiers=["ssd"] * 3))
    assert script.step([502])[0].token == 502
    script.idle()


def test_a_load_that_takes_too_long_is_stopped() -> None:
    script = Script(load_timeout_s=2.0)
    script.submit("a", 14)
    acquire = script.acquired(loading=3)
    script.reserved()
    assert script.core.next_wake() == 2.0
    script.now = 2.0
    script.expire()
    assert script.next(CancelLoad).op == acquire.op
    script.tell(LoadEnded(op=acquire.op, usable=0, tiers=[], reason="cancelled"))
    assert script.plan().chunks[0].start == 0


def test_a_lookup_that_never_comes_back_is_a_miss() -> None:
    script = Script(load_timeout_s=2.0)
    script.submit("a", 14, max_tokens=1)
    acquire = script.next(Acquire)
    script.now = 3.0
    script.expire()
    script.reserved()
    script.tell(Acquired(op=acquire.op, ready=[script.free.pop()], loading=[script.free.pop()]))
    assert script.next(CancelLoad).op == acquire.op
    script.tell(LoadEnded(op=acquire.op, usable=0, tiers=[]))
    script.step()
    script.idle()
    assert len(script.free) == 64


def test_the_youngest_is_preempted_and_comes_back_with_its_tokens() -> None:
    script = Script(slots=8, spare_slots=0)
    script.start("old", 10, max_tokens=16)
    script.start("young", 10, max_tokens=12)
    old: list[int] = []
    young: list[int] = []
    for _ in range(40):
        script.expire()
        script.answer_all()
        step = script.core.plan(script.now)
        script.now += 0.1
        if step is None:
            continue
        for event in script.finish(step):
            (old if event.request_id == "old" else young).append(event.token)
    assert (len(old), len(young)) == (16, 12)
    assert script.core.load().preemptions >= 1
    assert any("preempted" in line for line in script.core.story("young"))
    assert not any("preempted" in line for line in script.core.story("old"))
    script.idle()
    assert sorted(script.free) == list(range(8))


def test_usage_after_preemption_is_that_of_the_first_admission() -> None:
    script = Script(slots=8, spare_slots=0)
    script.start("old", 10, max_tokens=16)
    script.start("young", 10, max_tokens=12)
    usage = {}
    for _ in range(40):
        script.expire()
        script.answer_all()
        step = script.core.plan(script.now)
        script.now += 0.1
        if step is not None:
            usage.update({event.request_id: event.usage for event in script.finish(step) if event.finish})
    assert usage == {name: Usage(prompt=10, computed=10) for name in ("old", "young")}


def test_no_room_waits_without_holding_anything() -> None:
    script = Script(slots=16)
    script.start("a", 12)
    script.submit("b", 12)
    script.acquired(ready=1)
    refused = script.reserved(grant=False)
    assert refused.count == 2
    assert script.core.census()["waiting"] == 1
    script.now = 1.0
    script.expire()
    script.acquired()
    script.reserved()
    assert script.core.census()["running"] == 2


@pytest.mark.parametrize("state", ["waiting", "lookup", "loading", "reserving", "prefilling", "decoding"])
def test_cancel_in_every_state_frees_everything(state: str) -> None:
    script = Script(slots=32, step_tokens=8, max_running=1 if state == "waiting" else 8)
    if state == "waiting":
        script.start("first", 5, max_tokens=1)
    script.submit("a", 20, max_tokens=4)
    pending: Acquire | None = None
    if state == "loading":
        pending = script.acquired(ready=1, loading=2)
        script.reserved()
        script.tell(LayersReady(op=pending.op, layers=1))
        script.finish(script.plan())
    elif state == "reserving":
        script.acquired(ready=2)
    elif state in ("prefilling", "decoding"):
        script.answer_all()
        script.step()
        for _ in range(3 if state == "decoding" else 0):
            script.step()
    script.tell(Cancel(request_id="a"))
    assert not script.core.has("a")
    if pending is not None:
        assert script.core.census()["draining"] == 1
        script.next(CancelLoad)
        script.tell(LoadEnded(op=pending.op, usable=2, tiers=["ssd", "ssd"]))
    if state == "waiting":
        script.step()
    script.idle()
    assert sorted(script.free) == list(range(32))
    assert not any(isinstance(message, Failed) for message in script.sent)


def test_deadlines_fail_the_request() -> None:
    script = Script()
    script.start("a", 5, deadline_s=3.0)
    script.now = 3.0
    script.expire()
    assert script.sent[-1] == Failed(
        request_id="a", code="deadline_exceeded", message="the request's deadline passed", retryable=False
    )
    script.idle()


def test_refusals_say_why() -> None:
    script = Script(slots=8, max_waiting=1)
    script.submit("long", 199)
    script.submit("arena", 40)
    script.submit("empty", [])
    script.submit("vocab", [1000])
    script.submit("a", 20)
    script.submit("a", 20)
    script.submit("b", 20)
    script.submit("c", 20)
    script.tell(Drain())
    script.submit("d", 20)
    failed = [message for message in script.sent if isinstance(message, Failed)]
    assert [(m.request_id, m.code, m.retryable) for m in failed] == [
        ("long", "context_length_exceeded", False),
        ("arena", "context_length_exceeded", False),
        ("empty", "invalid_input", False),
        ("vocab", "invalid_input", False),
        ("a", "invalid_input", False),
        ("c", "overloaded", True),
        ("d", "unavailable", True),
    ]
    assert "arena" in failed[1].message


def test_stop_tokens_wait_for_min_tokens() -> None:
    script = Script()
    script.start("a", 5, max_tokens=8, min_tokens=2, stop_token_ids=(7,))
    assert [script.step([token])[0].finish for token in (7, 9, 7)] == [None, None, "stop"]
    script.idle()


def test_the_context_ends_a_stream() -> None:
    script = Script()
    script.start("a", 198, max_tokens=50)
    reasons = []
    while not reasons or reasons[-1] is None:
        script.expire()
        script.answer_all()
        reasons += [event.finish for event in script.finish(script.plan())]
    assert reasons == [None, "length"]


def test_history_is_passed_on_when_sampling_needs_it() -> None:
    script = Script()
    script.start("a", 5, repetition_penalty=1.2)
    step = script.plan()
    assert step.chunks[0].history == list(range(5))
    script.finish(step, [501])
    script.answer_all()
    assert script.plan().chunks[0].history == [*range(5), 501]


def test_slots_that_a_restarted_node_gave_away_are_not_used_again() -> None:
    script = Script()
    script.start("a", 10)
    script.start("b", 10)
    script.step()
    step = script.plan()
    lost = step.chunks[0].pages[0]
    script.finish(step)
    script.tell(PortBack(lost=[lost]))
    assert script.core.census()["running"] == 1
    assert script.next(Acquire).keys == keys([*range(10), 101, 103])[:2]


def test_a_failing_runner_fails_its_step_only() -> None:
    script = Script(max_running=1)
    script.start("a", 5)
    script.start("b", 5, max_tokens=1)
    script.take(script.core.abort(script.plan(), "out of luck", 0.0))
    assert script.sent[-1] == Failed(request_id="a", code="internal_error", message="out of luck", retryable=True)
    script.step()
    script.idle()


def test_misuse_of_the_core_is_told() -> None:
    script = Script()
    script.start("a", 5)
    step = script.plan()
    with pytest.raises(InvariantBroken, match="while a step is running"):
        script.core.plan(0.0)
    with pytest.raises(InvariantBroken, match="while a step is running"):
        script.core.handle(Drain(), 0.0)
    with pytest.raises(InvariantBroken, match="does not fit"):
        script.core.finish(step, [Sampled(step.chunks[0].seq, [1, 2])], 0.0)


def test_late_events_give_their_slots_back() -> None:
    script = Script()
    script.submit("a", 10)
    acquire = script.next(Acquire)
    script.tell(Cancel(request_id="a"))
    script.tell(Acquired(op=acquire.op, ready=[script.free.pop(0)], loading=[]))
    script.submit("b", 3)
    reserve = script.next(Reserve)
    script.tell(Cancel(request_id="b"))
    script.tell(Reserved(op=reserve.op, slots=[script.free.pop(0) for _ in range(reserve.count)]))
    script.idle()
    assert len(script.free) == 64
    assert BLOCK == 4
