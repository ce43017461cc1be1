"""A man in the middle of gateway and engine: control messages get lost, come twice, or the connection breaks.

Remembers the tickets that pass, for those who want to misuse them (`live.stranger`).
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from typing import Any

from anabranch.core.errors import Unavailable
from anabranch.core.live.link import Link, Listener, connect
from anabranch.core.messages import Message
from anabranch.engine.messages import Cancel, EngineToGateway, GatewayToEngine, Prefilled, Prepared, Start
from anabranch.testing.chaos.faults import CampaignFaults
from anabranch.transfer.api import Ticket

Tickets = deque[tuple[str, Ticket]]  # (id of the attempt, its ticket), latest last

STEPS: dict[type[Message], str] = {
    Prepared: "control.prepared",
    Prefilled: "control.prefilled",
    Start: "control.start",
    Cancel: "control.cancel",
}


class Tamper:
    """Listens on `address` for the gateway and passes on to the engine at `engine_address`. `seen` counts messages by
    type, before anything happens to them."""

    def __init__(self, address: str, engine_address: str, faults: CampaignFaults, tickets: Tickets) -> None:
        self.seen: Counter[str] = Counter()
        self._engine_address = engine_address
        self._faults = faults
        self._tickets = tickets
        self._lock = threading.Lock()
        self._pairs: dict[Link, Link] = {}
        self._listener = Listener(address, self._on_socket, name="tamper")

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            links = list(self._pairs)
        for link in links:
            link.close("tamper ends")
        for link in links:
            link.join()

    def _on_socket(self, sock: socket.socket) -> None:
        try:
            engine = connect(self._engine_address)
        except Unavailable:
            sock.close()
            return
        front = Link(sock, GatewayToEngine, self._pass_on, self._closed, name="tamper-gateway")
        back = Link(engine, EngineToGateway, self._pass_on, self._closed, name="tamper-engine")
        with self._lock:
            self._pairs[front], self._pairs[back] = back, front
        front.start()
        back.start()

    def _pass_on(self, link: Link, message: Any) -> None:
        self.seen[type(message).__name__] += 1
        if isinstance(message, Prepared):
            self._tickets.append((message.request_id, message.ticket))
        other = self._pairs.get(link)
        if other is None:
            return
        step = STEPS.get(type(message), "")
        kind = self._faults.draw(step) if step else ""
        if kind != "lose":
            other.send(message)
        if kind == "double":
            other.send(message)
        if self._faults.draw("control.cut"):
            link.close("cut by the campaign")

    def _closed(self, link: Link, reason: str) -> None:
        with self._lock:
            other = self._pairs.pop(link, None)
        if other is not None:
            other.close(reason)
