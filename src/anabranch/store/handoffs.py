"""Hand-offs of one node, in both directions: who may push what where, until when.

Inbound: the engine opens slots, the ticket goes out with a fresh secret, bytes arrive (`transfer.live.sink` checks
ticket, bounds and checksums), and it ends exactly once: complete, failed, abandoned or out of time. The slots are
pinned from open to end, so nothing can land in a slot that serves somebody else.
Outbound: every pushed slot is pinned until the sender is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from anabranch.store.actions import CloseSink, EndPush, InboundDone, NodeAction, OpenSink, OutboundDone, Push, StartPush
from anabranch.store.leases import Leases
from anabranch.store.messages import (
    InboundEndedReply,
    InboundOpenedReply,
    OpenInbound,
    OpenOutbound,
    OutboundEndedReply,
    PushLayer,
)
from anabranch.store.slots import SlotBook
from anabranch.transfer.api import Address, Ticket

VANISHED = "the engine is gone"


class Inbound(msgspec.Struct):
    session: bytes
    slots: list[int]


class Outbound(msgspec.Struct):
    """`empty`: the peer has everything already; nobody needs to be told."""

    session: bytes
    until: float
    pinned: dict[int, None] = {}
    ending: str | None = None
    empty: bool = False


class HandoffBook:
    """`secret()` gives fresh random bytes; `tell(session, message)` reaches the engine."""

    def __init__(
        self,
        book: SlotBook,
        address: Address,
        layers: int,
        counters: Counter[str],
        secret: Callable[[], bytes],
        act: Callable[[NodeAction], None],
        tell: Callable[[bytes, InboundOpenedReply | InboundEndedReply | OutboundEndedReply], None],
    ) -> None:
        self._book = book
        self._address = address
        self._layers = layers
        self._counters = counters
        self._secret = secret
        self._act = act
        self._tell = tell
        self.inbound: dict[str, Inbound] = {}
        self.outbound: dict[str, Outbound] = {}
        self._ends: Leases[tuple[str, str]] = Leases()

    def open_inbound(self, session: bytes, m: OpenInbound, now: float) -> None:
        held = self._book.held[session]
        sound = all(held[s] > 0 and s in self._book.private and s not in self._book.busy for s in m.slots)
        if m.handoff in self.inbound or not sound or len(set(m.slots)) != len(m.slots):
            self._counters["handoffs_refused"] += 1
            self._tell(
                session, InboundEndedReply(handoff=m.handoff, reason="refused: name in use or slots not private")
            )
            return
        secret = self._secret()
        self.inbound[m.handoff] = Inbound(session, m.slots)
        self._book.pin(m.slots)
        self._book.busy.update(m.slots)
        self._ends.grant(("in", m.handoff), now + m.deadline_s)
        ticket = Ticket(
            handoff=m.handoff,
            secret=secret,
            address=self._address,
            first=m.first,
            blocks=len(m.slots),
            layers=self._layers,
            deadline_s=m.deadline_s,
        )
        self._act(OpenSink(m.handoff, secret, m.slots, m.first))
        self._tell(session, InboundOpenedReply(handoff=m.handoff, ticket=ticket))

    def inbound_done(self, event: InboundDone) -> None:
        state = self.inbound.pop(event.handoff, None)
        if state is None:
            return
        self._ends.end(("in", event.handoff))
        self._book.busy.difference_update(state.slots)
        self._book.unpin(state.slots)
        self._counters["handoffs_in_failed" if event.reason else "handoffs_in"] += 1
        self._tell(state.session, InboundEndedReply(handoff=event.handoff, reason=event.reason))

    def open_outbound(self, session: bytes, m: OpenOutbound, now: float) -> None:
        if m.handoff in self.outbound:
            self._counters["handoffs_refused"] += 1
            self._tell(session, OutboundEndedReply(handoff=m.handoff, reason="refused: name in use"))
            return
        until = now + m.ticket.deadline_s
        self.outbound[m.handoff] = Outbound(session, until, empty=not m.ticket.blocks)
        self._ends.grant(("out", m.handoff), until)
        if m.ticket.blocks:
            self._act(StartPush(m.handoff, m.ticket))

    def push(self, session: bytes, m: PushLayer) -> None:
        state = self._mine(session, m.handoff)
        if state is None or state.ending is not None:
            return
        held = self._book.held[session]
        if state.empty and m.blocks:
            self._end(m.handoff, state, "pushed blocks that the ticket does not name")
            return
        if not 0 <= m.layer < self._layers or not all(held[slot] > 0 for slot, _ in m.blocks):
            self._end(m.handoff, state, "pushed a slot or layer that is not the engine's")
            return
        fresh = [slot for slot, _ in m.blocks if slot not in state.pinned]
        state.pinned.update(dict.fromkeys(fresh))
        self._book.pin(dict.fromkeys(fresh))
        self._act(Push(m.handoff, m.layer, m.blocks))

    def finish(self, session: bytes, handoff: str) -> None:
        state = self._mine(session, handoff)
        if state is not None and state.ending is None:
            self._end(handoff, state, "")

    def outbound_done(self, event: OutboundDone) -> None:
        state = self.outbound.pop(event.handoff, None)
        if state is None:
            return
        self._ends.end(("out", event.handoff))
        self._book.unpin(state.pinned)
        reason = event.reason or state.ending or ""
        self._counters["handoffs_out_failed" if reason else "handoffs_out"] += 1
        self._tell(state.session, OutboundEndedReply(handoff=event.handoff, reason=reason))

    def abandon(self, session: bytes, handoff: str, reason: str = "abandoned") -> None:
        inbound, outbound = self.inbound.get(handoff), self.outbound.get(handoff)
        if inbound is not None and inbound.session == session:
            self._act(CloseSink(handoff, reason))
        if outbound is not None and outbound.session == session:
            self._end(handoff, outbound, reason)

    def drop(self, session: bytes) -> None:
        """The engine is gone."""
        for handoff in [h for h, state in self.inbound.items() if state.session == session]:
            self._act(CloseSink(handoff, VANISHED))
        for handoff, out in list(self.outbound.items()):
            if out.session == session:
                self._end(handoff, out, VANISHED)

    def tick(self, now: float) -> None:
        for direction, handoff in self._ends.expired(now):
            self._counters["handoff_deadlines"] += 1
            if direction == "in":
                self._act(CloseSink(handoff, "deadline passed"))
            elif (state := self.outbound.get(handoff)) is not None:
                self._end(handoff, state, "deadline passed")

    def _mine(self, session: bytes, handoff: str) -> Outbound | None:
        state = self.outbound.get(handoff)
        return state if state is not None and state.session == session else None

    def _end(self, handoff: str, state: Outbound, reason: str) -> None:
        if not state.ending:
            state.ending = reason
            if state.empty:
                self.outbound_done(OutboundDone(handoff, reason))
            else:
                self._act(EndPush(handoff, reason))
