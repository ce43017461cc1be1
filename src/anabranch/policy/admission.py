"""How many requests may wait: beyond that, an early 429 serves a client better than a late timeout.

**Covers** the bound and the Retry-After estimate. **Does not cover** which engine serves a request (`policy.routing`).
"""

from __future__ import annotations

from anabranch.core.errors import Overloaded

LONGEST_RETRY_S = 60.0
SMOOTHING = 0.1


class Admission:
    """Counts requests that wait for their first token. Every `admit` is followed by exactly one `leave`."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0
        self._interval_s = 0.0
        self._last_started = 0.0

    def admit(self, count: int = 1) -> None:
        """Raises Overloaded, and takes nothing, if `count` more would exceed the bound."""
        if self.waiting == 0:
            # How long nobody asked says nothing about the pace.
            self._last_started = 0.0
        if self.waiting + count > self.max_waiting:
            raise Overloaded(
                f"{self.waiting} requests are waiting and at most {self.max_waiting} may; try again later",
                retry_after_s=self.retry_after_s(),
            )
        self.waiting += count

    def leave(self, now: float, *, started: bool) -> None:
        """One request stopped waiting: its first token came (`started`) or it ended without."""
        self.waiting -= 1
        if not started:
            return
        if self._last_started:
            gap = now - self._last_started
            self._interval_s += SMOOTHING * (gap - self._interval_s) if self._interval_s else gap
        self._last_started = now

    def retry_after_s(self) -> float:
        """When half of those waiting will probably have started, at the pace of late; 1 s to a minute."""
        return min(LONGEST_RETRY_S, max(1.0, self._interval_s * self.waiting / 2))
