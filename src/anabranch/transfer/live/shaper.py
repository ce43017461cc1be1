"""`transfer.classes` for threads: `send` returns when the slice may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from anabranch.core.errors import DeadlineExceeded
from anabranch.transfer.classes import MINIMUM_SHARES, Shaper, TrafficClass


class _Waiter:
    __slots__ = ("event", "granted")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.granted = False


class LinkShaper:
    """One link's senders, any number of threads. `rate_bytes` 0: unshaped, `send` returns at once (some 0.1 µs).

    One of the waiting threads keeps the time for all; the others sleep until they are granted or give up.
    """

    def __init__(
        self,
        rate_bytes: int = 0,
        *,
        shares: Mapping[TrafficClass, float] = MINIMUM_SHARES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate_bytes = rate_bytes
        self._shaper: Shaper[_Waiter] | None = Shaper(rate_bytes, shares=shares) if rate_bytes else None
        self._clock = clock
        self._lock = threading.Lock()
        self._keeper: _Waiter | None = None

    @property
    def waiting(self) -> int:
        return self._shaper.waiting if self._shaper is not None else 0

    def send(self, traffic: TrafficClass, count: int, timeout_s: float = 30.0) -> None:
        """Wait until `count` bytes may be sent; the caller sends them then. Raises DeadlineExceeded."""
        if self._shaper is None:
            return
        now = self._clock()
        with self._lock:
            if self._shaper.take(count, now):
                return
            waiter = _Waiter()
            self._shaper.ask(traffic, waiter, count)
        try:
            self._wait(self._shaper, waiter, now + timeout_s)
        finally:
            self._leave(self._shaper, waiter, traffic)
        if not waiter.granted:
            raise DeadlineExceeded(
                f"{count} bytes of {traffic.name.lower()} found no room on the link in {timeout_s} s"
            )

    def _wait(self, shaper: Shaper[_Waiter], waiter: _Waiter, deadline: float) -> None:
        while True:
            with self._lock:
                now = self._clock()
                for granted in shaper.grant(now):
                    granted.granted = True
                    granted.event.set()
                if waiter.granted or now >= deadline:
                    return
                if self._keeper is None:
                    self._keeper = waiter
                until = deadline
                if self._keeper is waiter and (wake := shaper.wake_at(now)) is not None:
                    until = min(until, wake)
                waiter.event.clear()
            waiter.event.wait(until - now)

    def _leave(self, shaper: Shaper[_Waiter], waiter: _Waiter, traffic: TrafficClass) -> None:
        with self._lock:
            if not waiter.granted:
                shaper.withdraw(traffic, waiter)
            if self._keeper is waiter:
                self._keeper = shaper.head()
                if self._keeper is not None:
                    self._keeper.event.set()
