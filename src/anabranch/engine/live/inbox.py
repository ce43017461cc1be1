"""Where an engine's events arrive, and where a running step waits for layers.

Any thread posts, one thread (the worker's) drains. What a running step must know at once, which layers of a load are
in place, is read off the events as they come in.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from anabranch.core.live.link import Link
from anabranch.engine.kv_port import Acquired, LayersReady, LoadEnded, PortEvent
from anabranch.engine.messages import Cancel, Drain, Prefill, Prepare, Start, Submit

Request = Submit | Prepare | Prefill | Start | Cancel | Drain


class LinkClosed:
    """A gateway's connection ended: its requests are cancelled."""


class Inbox:
    """Items are (link or None, event): None for events of the port."""

    def __init__(self) -> None:
        self._items: deque[tuple[Link | None, Request | PortEvent | LinkClosed]] = deque()
        self._changed = threading.Condition()
        self._layers: dict[int, int] = {}
        self._woken = False

    def port_event(self, event: PortEvent) -> None:
        """The sink to give to a `KvPort`."""
        with self._changed:
            match event:
                case Acquired() if event.loading:
                    self._layers[event.op] = 0
                case LayersReady():
                    self._layers[event.op] = event.layers
                case LoadEnded():
                    self._layers.pop(event.op, None)
                case _:
                    pass
            self._items.append((None, event))
            self._changed.notify_all()

    def post(self, link: Link, event: Request | LinkClosed) -> None:
        with self._changed:
            self._items.append((link, event))
            self._changed.notify_all()

    def wake(self) -> None:
        """Let `wait` return although nothing has come."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def drain(self) -> list[tuple[Link | None, Request | PortEvent | LinkClosed]]:
        with self._changed:
            items = list(self._items)
            self._items.clear()
        return items

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, when woken, or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._woken, timeout_s)
            self._woken = False

    def wait_layer(self, op: int, layer: int, clock: Callable[[], float], until: float) -> bool:
        """Whether `layer` of load `op` is in place, or the load is over, before `until`."""

        def ready() -> bool:
            layers = self._layers.get(op)
            return layers is None or layers > layer

        with self._changed:
            return self._changed.wait_for(ready, max(0.0, until - clock()))
