"""What joins in-process nodes: deliveries that wait until a test pumps them, in the order it chooses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from anabranch.engine.kv_port import InboundEnded, OutboundEnded

if TYPE_CHECKING:
    from anabranch.testing.fakes import LocalPort


class PortFaults:
    """Switches for a test; each is asked once per occasion. Default: nothing goes wrong."""

    def load_usable(self, op: int, blocks: int, layers: int) -> tuple[int, int]:
        """(usable blocks, layers in place) with which a load of `blocks` × `layers` ends."""
        return blocks, layers

    def refuse_reserve(self, op: int, count: int) -> bool:
        return False

    def break_push(self, handoff: str, layer: int) -> bool:
        """Fail the hand-off at this push."""
        return False


class Fabric:
    """Deliveries between ports, by channel. `choose(n)` picks one of n channels; default the oldest."""

    def __init__(self, choose: Callable[[int], int] | None = None) -> None:
        self.lock = threading.RLock()
        self.ports: list[LocalPort] = []
        self.inbound: dict[str, Inbound] = {}
        self.outbound: dict[str, Outbound] = {}
        self._choose = choose or (lambda channels: 0)
        self._channels: dict[object, deque[Callable[[], None]]] = {}

    def post(self, channel: object, deliver: Callable[[], None]) -> None:
        with self.lock:
            self._channels.setdefault(channel, deque()).append(deliver)

    def pump(self, limit: int | None = None) -> int:
        """Deliver until nothing is left or `limit` is reached; returns how many."""
        done = 0
        with self.lock:
            while self._channels and (limit is None or done < limit):
                channel = list(self._channels)[self._choose(len(self._channels))]
                queue = self._channels[channel]
                deliver = queue.popleft()
                if not queue:
                    del self._channels[channel]
                deliver()
                done += 1
        return done

    @property
    def pending(self) -> int:
        return sum(len(queue) for queue in self._channels.values())

    def expire(self, handoff: str) -> None:
        """The deadline of a hand-off passes."""
        self.fail(handoff, "deadline passed", "deadline passed")

    def fail(self, handoff: str, inbound_reason: str, outbound_reason: str) -> None:
        inbound, outbound = self.inbound.pop(handoff, None), self.outbound.pop(handoff, None)
        if inbound is not None:
            inbound.port.emit(handoff, InboundEnded(handoff=handoff, reason=inbound_reason))
        if outbound is not None:
            outbound.port.emit(handoff, OutboundEnded(handoff=handoff, reason=outbound_reason))


class Inbound:
    """The receiving end of a hand-off: which (layer, prompt block) have not arrived."""

    def __init__(self, port: LocalPort, slots: Sequence[int], first: int, secret: bytes) -> None:
        self.port = port
        self.slots = list(slots)
        self.first = first
        self.secret = secret
        self.missing = {(layer, first + i) for layer in range(port.layout.layers) for i in range(len(slots))}


class Outbound:
    """The sending end of a hand-off."""

    def __init__(self, port: LocalPort, secret: bytes) -> None:
        self.port = port
        self.secret = secret
