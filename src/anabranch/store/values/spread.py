"""Which slice goes over which lane: late-bound. A lane that has room takes the next slice, so a fast lane moves more.

Pure and not thread-safe: whoever shares it among threads holds a lock round each call. `transfer.spread` offers the
same `next_slice(lane)` for lanes over several network cards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class SliceQueue:
    """Pieces (item, slice) that wait, are under way on a lane, or are done."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self._under_way: dict[int, list[tuple[int, int]]] = {}

    def add(self, pieces: Iterable[tuple[int, int]]) -> None:
        self._waiting.extend(pieces)

    def next_slice(self, lane: int) -> tuple[int, int] | None:
        """None: nothing waits (something may still be under way, and come back)."""
        if not self._waiting:
            return None
        piece = self._waiting.popleft()
        self._under_way.setdefault(lane, []).append(piece)
        return piece

    def done(self, lane: int, piece: tuple[int, int]) -> bool:
        """False: it was not this lane's any more (dropped, or given to another)."""
        under_way = self._under_way.get(lane, [])
        if piece not in under_way:
            return False
        under_way.remove(piece)
        return True

    def lost(self, lane: int) -> None:
        """The lane died: what was under way on it waits again, first in line."""
        self._waiting.extendleft(reversed(self._under_way.pop(lane, [])))

    def drop(self, item: int) -> None:
        """Nothing of this item is wanted any more. What is under way may still arrive: then `done` is False."""
        self._waiting = deque(piece for piece in self._waiting if piece[0] != item)
        for lane, under_way in self._under_way.items():
            self._under_way[lane] = [piece for piece in under_way if piece[0] != item]

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def empty(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not self._waiting and not any(self._under_way.values())
