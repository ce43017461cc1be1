"""Men in the middle: between gateway and engine control messages get lost, come twice, or the connection breaks;
between engine and node the connection breaks although both live. Tickets that pass are remembered, for those who want
to misuse them (`live.stranger`).
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import Unavailable
from anabranch.core.live.link import Link, Listener, connect
from anabranch.core.messages import Message
from anabranch.engine.messages import Cancel, EngineToGateway, GatewayToEngine, Prefilled, Prepared, Start
from anabranch.store.messages import NodeToPort, PortToNode
from anabranch.testing.chaos.faults import CampaignFaults
from anabranch.transfer.api import Ticket

Tickets = deque[tuple[str, Ticket]]  # (id of the attempt, its ticket), latest last

STEPS: dict[type[Message], str] = {
    Prepared: "control.prepared",
    Prefilled: "control.prefilled",
    Start: "control.start",
    Cancel: "control.cancel",
}


class Middle:
    """Listens on `address` and passes every message on to `target`, and back. `what(message)` says what becomes of it:
    "" (passed on), "lose", "double", or "cut" (passed on, and then the connection breaks on both sides)."""

    def __init__(
        self, address: str, target: str, *, asks: Any, answers: Any, what: Callable[[Any], str] = lambda message: ""
    ) -> None:
        self._target = target
        self._asks = asks
        self._answers = answers
        self._what = what
        self._lock = threading.Lock()
        self._pairs: dict[Link, Link] = {}
        self._listener = Listener(address, self._on_socket, name="middle")

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            links = list(self._pairs)
        for link in links:
            link.close("the middle ends")
        for link in links:
            link.join()

    def _on_socket(self, sock: socket.socket) -> None:
        try:
            onward = connect(self._target)
        except Unavailable:
            sock.close()
            return
        front = Link(sock, self._asks, self._pass_on, self._closed, name="middle-front")
        back = Link(onward, self._answers, self._pass_on, self._closed, name="middle-back")
        with self._lock:
            self._pairs[front], self._pairs[back] = back, front
        front.start()
        back.start()

    def _pass_on(self, link: Link, message: Any) -> None:
        other = self._pairs.get(link)
        if other is None:
            return
        kind = self._what(message)
        if kind != "lose":
            other.send(message)
        if kind == "double":
            other.send(message)
        if kind == "cut":
            link.close("cut by the campaign")
            other.close("cut by the campaign")

    def _closed(self, link: Link, reason: str) -> None:
        with self._lock:
            other = self._pairs.pop(link, None)
        if other is not None:
            other.close(reason)


class Tamper(Middle):
    """Between gateway and engine. `seen` counts messages by type, before anything happens to them."""

    def __init__(self, address: str, engine_address: str, faults: CampaignFaults, tickets: Tickets) -> None:
        self.seen: Counter[str] = Counter()
        self._faults = faults
        self._tickets = tickets
        super().__init__(address, engine_address, asks=GatewayToEngine, answers=EngineToGateway, what=self._judge)

    def _judge(self, message: Any) -> str:
        self.seen[type(message).__name__] += 1
        if isinstance(message, Prepared):
            self._tickets.append((message.request_id, message.ticket))
        step = STEPS.get(type(message), "")
        return (self._faults.draw(step) if step else "") or self._faults.draw("control.cut")


class PortCutter(Middle):
    """Between engine and node."""

    def __init__(self, address: str, node_address: str, faults: CampaignFaults) -> None:
        super().__init__(
            address, node_address, asks=PortToNode, answers=NodeToPort, what=lambda message: faults.draw("port.cut")
        )
