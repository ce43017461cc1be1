"""What an engine port has outstanding at its node, and the events that answer it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from anabranch.engine import kv_port as port
from anabranch.store import messages as m


class PortState:
    """`held` is {slot: references}; it is what the port tells a restarted node."""

    def __init__(self) -> None:
        self.held: Counter[int] = Counter()
        self.acquires: dict[int, list[int] | None] = {}
        self.reserves: dict[int, int] = {}
        self.inbound: set[str] = set()
        self.outbound: set[str] = set()

    def event(self, message: Any) -> port.PortEvent | None:
        """The event for a node's message, with the books updated; None for an answer to what has ended already."""
        match message:
            case m.AcquiredReply(op=op, ready=ready, loading=loading):
                self.held.update(ready)
                self.held.update(loading)
                if loading:
                    self.acquires[op] = loading
                else:
                    self.acquires.pop(op, None)
                return port.Acquired(op=op, ready=ready, loading=loading)
            case m.LayersReadyReply(op=op, layers=layers):
                return port.LayersReady(op=op, layers=layers)
            case m.LoadEndedReply(op=op, usable=usable, tiers=tiers, reason=reason):
                self.acquires.pop(op, None)
                return port.LoadEnded(op=op, usable=usable, tiers=tiers, reason=reason)
            case m.ReservedReply(op=op, slots=slots):
                if self.reserves.pop(op, None) is None:
                    return None
                self.held.update(slots)
                return port.Reserved(op=op, slots=slots)
            case m.InboundOpenedReply(handoff=handoff, ticket=ticket):
                return port.InboundOpened(handoff=handoff, ticket=ticket)
            case m.InboundEndedReply(handoff=handoff, reason=reason):
                self.inbound.discard(handoff)
                return port.InboundEnded(handoff=handoff, reason=reason)
            case m.OutboundEndedReply(handoff=handoff, reason=reason):
                self.outbound.discard(handoff)
                return port.OutboundEnded(handoff=handoff, reason=reason)
        return None

    def give_back(self, slots: Iterable[int]) -> list[int]:
        """The ones that are held, with one reference less each; others (lost in a restart) are left out."""
        known: list[int] = []
        for slot in slots:
            if self.held[slot] > 0:
                known.append(slot)
                self.held[slot] -= 1
            if self.held[slot] <= 0:
                del self.held[slot]
        return known

    def forget(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self.held[slot]

    def end_outstanding(self, reason: str) -> list[port.PortEvent]:
        """The node is gone: misses for look-ups, ends for loads and hand-offs. Reserves stay for the next node."""
        events: list[port.PortEvent] = []
        for op, loading in self.acquires.items():
            if loading is None:
                events.append(port.Acquired(op=op, ready=[], loading=[]))
            else:
                events.append(port.LoadEnded(op=op, usable=0, tiers=[], reason=reason))
        events += [port.InboundEnded(handoff=handoff, reason=reason) for handoff in sorted(self.inbound)]
        events += [port.OutboundEnded(handoff=handoff, reason=reason) for handoff in sorted(self.outbound)]
        self.acquires.clear()
        self.inbound.clear()
        self.outbound.clear()
        return events
