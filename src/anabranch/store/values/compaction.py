"""One large hole out of several: unused values beside it move into other holes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice

from anabranch.paging.extents import PAGE, Extents, rounded
from anabranch.store.values.entries import Entry

HOLES_TRIED = 4
TARGETS_TRIED = 8


class Compaction:
    """`starts`, `ends`: which value begins, or ends, at a byte of the arena. `move(entry, target)` moves a value to an
    extent that was taken for it; `drop(entry)` forgets one."""

    def __init__(
        self,
        extents: Extents,
        starts: Mapping[int, Entry],
        ends: Mapping[int, Entry],
        move: Callable[[Entry, int], None],
        drop: Callable[[Entry], None],
    ) -> None:
        self._extents = extents
        self._starts = starts
        self._ends = ends
        self._move = move
        self._drop = drop

    def clear(self, size: int) -> int | None:
        """An extent for `size` bytes, which no hole holds although there are as many free bytes; None if the values
        between them cannot give way."""
        for hole in list(islice(self._extents.holes(), HOLES_TRIED)):
            wider: tuple[int, int] | None = hole
            # A page more than needed: the ends may be lost to alignment.
            while wider is not None and wider[1] - wider[0] < rounded(size) + PAGE:
                wider = self._widen(*wider)
                start = self._extents.take(size) if wider is not None else None
                if start is not None:
                    return start
        return None

    def _widen(self, low: int, high: int) -> tuple[int, int] | None:
        for entry in (self._ends.get(low), self._starts.get(high)):
            if entry is None or entry.refs or rounded(entry.size) > high - low:
                continue
            start = entry.offset
            wider = min(low, start), max(high, start + rounded(entry.size))
            if not entry.live:
                self._drop(entry)
                return wider
            target = self._elsewhere(entry.size, low, high)
            if target is not None:
                self._move(entry, target)
                return wider
        return None

    def _elsewhere(self, size: int, low: int, high: int) -> int | None:
        """An extent outside low … high."""
        refused: list[int] = []
        target = self._extents.take(size)
        while target is not None and low <= target < high and len(refused) < TARGETS_TRIED:
            refused.append(target)
            target = self._extents.take(size)
        if target is not None and low <= target < high:
            refused.append(target)
            target = None
        for start in refused:
            self._extents.give(start, size)
        return target
