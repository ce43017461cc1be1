"""Both ends of a hand-off, one event at a time."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_script import Script, keys, request

from anabranch.engine.actions import Abandon, FinishOutbound, OpenInbound, OpenOutbound
from anabranch.engine.kv_port import InboundEnded, InboundOpened, LayersReady, LoadEnded, OutboundEnded, PortBack
from anabranch.engine.messages import Cancel, Failed, Prefill, Prefilled, Prepare, Prepared, Start, StepOutput
from anabranch.engine.request import Usage
from anabranch.transfer.api import Address, Ticket


def ticket(handoff: str, first: int, blocks: int) -> Ticket:
    address = Address("localhost", 1)
    return Ticket(handoff=handoff, secret=b"s", address=address, first=first, blocks=blocks, layers=2, deadline_s=9.0)


class Decode(Script):
    """Up to the ticket: `opened` is the inbound hand-off."""

    def prepare(self, name: str, prompt: int, *, cached: int = 0, **options: Any) -> OpenInbound:
        self.tell(Prepare(request=request(name, prompt, **options)))
        acquire = self.acquired(ready=cached)
        assert not acquire.load
        self.reserved()
        opened = self.next(OpenInbound)
        self.tell(InboundOpened(handoff=opened.handoff, ticket=ticket(opened.handoff, cached, len(opened.slots))))
        return opened


class PrefillSide(Script):
    def prefill(self, name: str, prompt: int, first: int, *, ready: int = 0, loading: int = 0, **options: Any) -> int:
        blocks = -(-prompt // 4) - first
        self.tell(Prefill(request=request(name, prompt, **options), ticket=ticket("h", first, blocks)))
        acquire = self.acquired(ready=ready, loading=loading)
        self.reserved()
        self.next(OpenOutbound)
        return acquire.op

    def run(self) -> None:
        """One step, with what its layers send."""
        step = self.plan()
        for layer in range(2):
            self.pushes += [action for push in step.pushes if (action := push.at(layer)) is not None]
        self.finish(step)

    def sent_blocks(self) -> list[tuple[int, int]]:
        return [(push.layer, index) for push in self.pushes for _, index in push.blocks]


@pytest.mark.parametrize("start_first", [True, False])
def test_decode_runs_when_both_start_and_the_bytes_are_here(start_first: bool) -> None:
    script = Decode()
    opened = script.prepare("a", 10, cached=1, max_tokens=3)
    assert (opened.first, len(opened.slots)) == (1, 2)
    assert script.sent == [Prepared(request_id="a", ticket=ticket(opened.handoff, 1, 2), cached=4)]
    events = [Start(request_id="a", first=[501]), InboundEnded(handoff=opened.handoff)]
    for event in events if start_first else events[::-1]:
        assert script.core.plan(0.0) is None
        script.tell(event)
    assert [block.key for block in script.commits] == [keys(range(10))[1]]
    (event,) = script.step([502])
    assert (event.token, event.finish, event.usage) == (502, None, None)
    assert script.step([503])[0].finish == "length"
    script.idle()


def test_choices_that_ended_with_their_first_token_are_not_run() -> None:
    script = Decode()
    opened = script.prepare("a", 9, n=2, max_tokens=3, stop_token_ids=(7,))
    script.tell(InboundEnded(handoff=opened.handoff))
    script.tell(Start(request_id="a", first=[7, 8]))
    script.answer_all()
    (chunk,) = script.plan().chunks
    assert (chunk.first_choice, chunk.tokens) == (1, [8])


def test_a_failed_handoff_is_recomputed_at_decode() -> None:
    script = Decode()
    opened = script.prepare("a", 10, cached=1, n=2, max_tokens=2)
    script.tell(InboundEnded(handoff=opened.handoff, reason="connection broken"))
    script.tell(Start(request_id="a", first=[501, 502]))
    step = script.plan()
    assert [(chunk.start, chunk.sample) for chunk in step.chunks] == [(4, 0)]
    assert script.finish(step) == []
    events = script.step([601, 602])
    assert [(event.index, event.token, event.finish) for event in events] == [(0, 601, "length"), (1, 602, "length")]
    script.idle()
    assert not any(isinstance(message, Failed) for message in script.sent)


def test_pages_lost_while_waiting_for_start_are_taken_anew() -> None:
    script = Decode()
    opened = script.prepare("a", 10, max_tokens=2)
    script.tell(InboundEnded(handoff=opened.handoff, reason="the node is gone"))
    script.tell(PortBack(lost=opened.slots[:1]))
    script.tell(Start(request_id="a", first=[501]))
    script.answer_all()
    script.step()
    assert script.step([601])[0].finish == "length"
    script.idle()


def test_an_inbound_that_cannot_open_fails_the_preparation() -> None:
    script = Decode()
    script.tell(Prepare(request=request("a", 10)))
    script.acquired()
    script.reserved()
    script.tell(InboundEnded(handoff=script.next(OpenInbound).handoff, reason="the node is gone"))
    (failed,) = script.sent
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable) == ("unavailable", True)
    script.idle()


@pytest.mark.parametrize("opened_first", [True, False])
def test_a_cancelled_preparation_keeps_its_pages_until_the_transfer_let_go(opened_first: bool) -> None:
    script = Decode()
    script.tell(Prepare(request=request("a", 10)))
    script.acquired()
    script.reserved()
    opened = script.next(OpenInbound)
    event = InboundOpened(handoff=opened.handoff, ticket=ticket(opened.handoff, 0, 3))
    if opened_first:
        script.tell(event)
    script.tell(Cancel(request_id="a"))
    if not opened_first:
        script.tell(event)
    assert script.next(Abandon).handoff == opened.handoff
    assert script.core.census()["slots"] == 3
    script.tell(InboundEnded(handoff=opened.handoff, reason="abandoned"))
    script.idle()


def test_prefill_sends_each_missing_block_once_layer_by_layer() -> None:
    script = PrefillSide(step_tokens=9)
    script.prefill("a", 18, first=1, ready=2)
    assert script.sent_blocks() == [(0, 1), (1, 1)]
    script.pushes.clear()
    script.run()
    assert script.sent_blocks() == [(0, 2), (0, 3), (1, 2), (1, 3)]
    script.pushes.clear()
    script.run()
    assert script.sent_blocks() == [(0, 4), (1, 4)]
    (prefilled,) = script.sent
    assert isinstance(prefilled, Prefilled)
    assert prefilled.usage == Usage(prompt=18, computed=10, dram=8)
    assert [(event.index, event.finish) for event in prefilled.first] == [(0, None)]
    assert script.next(FinishOutbound).handoff == "h"
    assert script.core.census()["slots"] == 5
    script.tell(OutboundEnded(handoff="h"))
    script.idle()


def test_a_chunk_that_ends_inside_a_block_leaves_it_to_the_next() -> None:
    script = PrefillSide(step_tokens=3)
    script.prefill("a", 6, first=0)
    script.run()
    script.pushes.clear()
    script.run()
    assert script.sent_blocks() == [(0, 1), (1, 1)]


def test_loading_blocks_are_forwarded_as_their_layers_arrive() -> None:
    script = PrefillSide()
    op = script.prefill("a", 14, first=0, loading=2)
    script.tell(LayersReady(op=op, layers=1))
    assert script.sent_blocks() == [(0, 0), (0, 1)]
    script.run()
    assert len(script.sent_blocks()) == 2
    script.tell(LoadEnded(op=op, usable=2, tiers=["peer", "peer"]))
    assert sorted(script.sent_blocks()) == [(layer, block) for layer in range(2) for block in range(4)]
    assert any(isinstance(message, Prefilled) for message in script.sent)


def test_a_forwarded_load_that_falls_short_gives_the_handoff_up_but_not_the_request() -> None:
    script = PrefillSide()
    op = script.prefill("a", 14, first=0, loading=2)
    script.tell(LayersReady(op=op, layers=1))
    script.tell(LoadEnded(op=op, usable=1, tiers=["peer"], reason="short read"))
    assert script.next(Abandon).handoff == "h"
    script.tell(OutboundEnded(handoff="h", reason="abandoned"))
    script.run()
    (prefilled,) = script.sent
    assert isinstance(prefilled, Prefilled)
    assert prefilled.usage == Usage(prompt=14, computed=10, peer=4)
    script.idle()


def test_a_handoff_that_fails_early_lets_prefill_answer() -> None:
    script = PrefillSide(step_tokens=9)
    script.prefill("a", 18, first=0, n=2, max_tokens=1)
    script.run()
    script.tell(OutboundEnded(handoff="h", reason="peer gone"))
    script.pushes.clear()
    script.run()
    script.run()
    assert script.pushes == []
    (prefilled,) = script.sent
    assert isinstance(prefilled, Prefilled)
    assert [event.finish for event in prefilled.first] == ["length", "length"]
    script.idle()


def test_a_cancelled_prefill_keeps_its_pages_until_the_transfer_let_go() -> None:
    script = PrefillSide(step_tokens=8)
    script.prefill("a", 18, first=0)
    script.run()
    script.tell(Cancel(request_id="a"))
    script.next(Abandon)
    assert script.core.census()["slots"] == 5
    script.tell(OutboundEnded(handoff="h", reason="abandoned"))
    script.idle()


def test_a_prefill_whose_peer_never_answers_ends_at_its_deadline() -> None:
    script = PrefillSide()
    script.prefill("a", 6, first=0, deadline_s=5.0)
    script.run()
    script.now = 6.0
    script.expire()
    script.next(Abandon)
    script.tell(OutboundEnded(handoff="h", reason="abandoned"))
    script.idle()
    assert not any(isinstance(message, Failed | StepOutput) for message in script.sent)


def test_a_handoff_to_itself_is_refused() -> None:
    script = Decode()
    opened = script.prepare("a", 10)
    script.tell(Prefill(request=request("b", 10), ticket=ticket(opened.handoff, 0, 3)))
    failed = script.sent[-1]
    assert isinstance(failed, Failed)
    assert not failed.retryable


def test_start_must_name_every_choice() -> None:
    script = Decode()
    opened = script.prepare("a", 10, n=2)
    script.tell(Start(request_id="a", first=[1]))
    assert isinstance(script.sent[-1], Failed)
    script.tell(InboundEnded(handoff=opened.handoff, reason="abandoned"))
    script.idle()
