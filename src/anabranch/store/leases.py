"""Promises with an end time. Pure: the owner says what time it is."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from anabranch.core.errors import InvariantBroken

K = TypeVar("K")


class Leases(Generic[K]):
    """Names with deadlines (seconds on the owner's clock). Every operation is O(log n) or better, amortised."""

    def __init__(self) -> None:
        self._until: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, name: object) -> bool:
        return name in self._until

    def grant(self, name: K, until: float) -> None:
        """A new lease. Raises InvariantBroken if the name has one (use `extend`)."""
        if name in self._until:
            raise InvariantBroken(f"lease {name!r} granted twice")
        self._push(name, until)

    def extend(self, name: K, until: float) -> bool:
        """A later end; False if the lease is over already: it cannot be revived."""
        if name not in self._until:
            return False
        self._push(name, max(until, self._until[name]))
        return True

    def end(self, name: K) -> bool:
        """The holder gives it back; False if it had ended before."""
        return self._until.pop(name, None) is not None

    def expired(self, now: float) -> list[K]:
        """Leases that ended by `now`, earliest first; each is reported once and is gone afterwards."""
        over: list[K] = []
        while self._heap and self._heap[0][0] <= now:
            until, _, name = heapq.heappop(self._heap)
            if self._until.get(name) == until:
                del self._until[name]
                over.append(name)
        return over

    def next_end(self) -> float | None:
        while self._heap and self._until.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _push(self, name: K, until: float) -> None:
        self._until[name] = until
        self._count += 1
        heapq.heappush(self._heap, (until, self._count, name))
