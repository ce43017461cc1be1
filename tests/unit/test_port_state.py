"""What an engine port says when its node is gone and back."""

from __future__ import annotations

from anabranch.connectors.port_state import PortState
from anabranch.engine import kv_port as port
from anabranch.store import messages as m


def test_held_is_granted_minus_given_back() -> None:
    state = PortState()
    state.reserves[1] = 2
    state.event(m.ReservedReply(op=1, slots=[3, 4]))
    state.event(m.AcquiredReply(op=2, ready=[4], loading=[5]))
    assert state.held == {3: 1, 4: 2, 5: 1}
    assert state.give_back([4, 3, 3, 9]) == [4, 3]
    assert state.held == {4: 1, 5: 1}
    state.forget([4])
    assert state.held == {5: 1}


def test_the_end_of_the_node_ends_everything_outstanding_but_reserves() -> None:
    state = PortState()
    state.acquires[1] = None
    state.event(m.AcquiredReply(op=2, ready=[], loading=[5]))
    state.reserves[3] = 4
    state.inbound.add("in")
    state.outbound.add("out")
    assert state.end_outstanding("gone") == [
        port.Acquired(op=1, ready=[], loading=[]),
        port.LoadEnded(op=2, usable=0, tiers=[], reason="gone"),
        port.InboundEnded(handoff="in", reason="gone"),
        port.OutboundEnded(handoff="out", reason="gone"),
    ]
    assert state.end_outstanding("gone") == []
    assert state.reserves == {3: 4}


def test_an_answer_to_a_reserve_that_nobody_waits_for_is_no_event() -> None:
    assert PortState().event(m.ReservedReply(op=1, slots=[1])) is None
