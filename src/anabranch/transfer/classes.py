"""Traffic classes, and who may send next on a link of limited rate.

The choice is strict priority with a minimum share. Strict, because a lower class is work that can wait by definition:
a load that waits behind a migration makes a user wait for nothing. But never *only* strict: a class that gets nothing
for long runs into its deadlines and is tried again, so each class with something to send is owed its MINIMUM_SHARES of
what the link sends meanwhile, and goes first as soon as that pays for its next slice. (Weighted fair sharing would give
migrations their weight while loads wait; a hard reservation would leave the link idle.) The shares leave 70 % to the
highest class when all are waiting; any class has the whole link when the others are silent.

**See also** `transfer.live.shaper` (threads), `transfer.live.marks` (the same order on packets).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from typing import Generic, Literal, TypeVar

from anabranch.core.errors import InvalidInput


class TrafficClass(IntEnum):
    """Most urgent first; numbers are on the wire and never reused."""

    MODEL = 0
    HANDOFF = 1
    LOAD = 2
    PREFETCH = 3
    WRITEBACK = 4
    MIGRATE = 5


TrafficName = Literal["model", "handoff", "load", "prefetch", "writeback", "migrate"]


def traffic_class(name: str) -> TrafficClass:
    """Raises InvalidInput."""
    try:
        return TrafficClass[name.upper()]
    except KeyError as error:
        names = ", ".join(traffic.name.lower() for traffic in TrafficClass)
        raise InvalidInput(f"no traffic class {name!r}; there are {names}") from error


MINIMUM_SHARES: Mapping[TrafficClass, float] = {
    TrafficClass.MODEL: 0.0,
    TrafficClass.HANDOFF: 0.10,
    TrafficClass.LOAD: 0.10,
    TrafficClass.PREFETCH: 0.05,
    TrafficClass.WRITEBACK: 0.03,
    TrafficClass.MIGRATE: 0.02,
}
BURST_S = 0.02
"""A link that was idle may send this long at any speed; it makes up for a late timer and is not noticed on a NIC."""
T = TypeVar("T")


class Shaper(Generic[T]):
    """A token bucket of `rate_bytes` a second (> 0) before one queue a class. A grant needs a bucket that is not empty
    and may overdraw it, so slices of any size pass and the average is exact. Not thread-safe."""

    def __init__(self, rate_bytes: float, *, shares: Mapping[TrafficClass, float] = MINIMUM_SHARES) -> None:
        self._rate = rate_bytes
        self._shares = [shares.get(traffic, 0.0) for traffic in TrafficClass]
        self._queues: list[deque[tuple[T, int]]] = [deque() for _ in TrafficClass]
        self._owed = [0.0] * len(TrafficClass)
        self._waiting = 0
        self._tokens = rate_bytes * BURST_S
        self._filled_at: float | None = None

    @property
    def waiting(self) -> int:
        return self._waiting

    def take(self, count: int, now: float) -> bool:
        """Send `count` bytes at once, if nobody waits and the link has room."""
        if self._waiting:
            return False
        self._fill(now)
        if self._tokens <= 0:
            return False
        self._tokens -= count
        return True

    def ask(self, traffic: TrafficClass, ticket: T, count: int) -> None:
        """Wait for permission to send `count` bytes; first come, first served within a class."""
        self._queues[traffic].append((ticket, count))
        self._waiting += 1

    def grant(self, now: float) -> list[T]:
        """Who may send now, in this order."""
        self._fill(now)
        granted = []
        while self._waiting and self._tokens > 0:
            traffic = self._first()
            ticket, count = self._queues[traffic].popleft()
            self._tokens -= count
            self._waiting -= 1
            self._charge(traffic, count)
            granted.append(ticket)
        return granted

    def withdraw(self, traffic: TrafficClass, ticket: T) -> bool:
        """Wait no longer. False: it was not waiting (any more)."""
        queue = self._queues[traffic]
        found = next((item for item in queue if item[0] is ticket), None)
        if found is None:
            return False
        queue.remove(found)
        self._waiting -= 1
        if not queue:
            self._owed[traffic] = 0.0
        return True

    def wake_at(self, now: float) -> float | None:
        """When to call `grant` again; None: nobody waits."""
        if not self._waiting:
            return None
        self._fill(now)
        # A hair above empty: equality would not be granted.
        return now + max(0.0, 1.0 - self._tokens) / self._rate

    def head(self) -> T | None:
        """The most urgent one that waits."""
        return next((queue[0][0] for queue in self._queues if queue), None)

    def _first(self) -> int:
        waiting = [traffic for traffic, queue in enumerate(self._queues) if queue]
        owed = (traffic for traffic in waiting if self._owed[traffic] >= self._queues[traffic][0][1])
        return next(owed, waiting[0])

    def _charge(self, traffic: int, count: int) -> None:
        for other, queue in enumerate(self._queues):
            if queue or other == traffic:
                self._owed[other] += self._shares[other] * count
        self._owed[traffic] = max(0.0, self._owed[traffic] - count) if self._queues[traffic] else 0.0

    def _fill(self, now: float) -> None:
        if self._filled_at is not None:
            grown = self._tokens + (now - self._filled_at) * self._rate
            self._tokens = min(grown, max(self._tokens, self._rate * BURST_S))
        self._filled_at = now
