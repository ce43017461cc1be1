"""Which byte ranges of one arena are free.

**Covers** best fit, merging of neighbours, small values from the low end and large ones from the high end.
**Does not cover** what lies in an extent (`store.values.shelf`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise

from anabranch.core.errors import InvalidInput, InvariantBroken

PAGE = 4096
GRAIN = 64
STRIP = 64 << 10
"""Small values are cut off a strip of this size one after the other."""


def rounded(size: int) -> int:
    """Bytes that a value of `size` occupies: whole pages from a page up, else whole grains; at least one grain."""
    if size >= PAGE:
        return -(-size // PAGE) * PAGE
    return max(GRAIN, -(-size // GRAIN) * GRAIN)


class Extents:
    """Free ranges of `size` bytes. The smallest range that fits is cut: its low end for less than a page (by way of a
    strip, so that most of these cost O(1)), its high end, page-aligned, for more. O(log n) per call plus an insertion
    into the list of distinct sizes.

    Raises InvariantBroken when bytes are given back that are free already."""

    def __init__(self, size: int) -> None:
        if size < GRAIN:
            raise InvalidInput(f"an arena needs at least {GRAIN} bytes, got {size}")
        self.size = size - size % GRAIN
        self.free = 0
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._strip = self._strip_end = 0
        self._add(0, self.size)

    def __len__(self) -> int:
        """Free ranges."""
        self._end_strip()
        return len(self._starts)

    def take(self, size: int) -> int | None:
        """Start of `rounded(size)` bytes, None if no free range holds them."""
        need = rounded(size)
        start = self._take_small(need) if need < PAGE else self._take_pages(need)
        if start is None and self._strip < self._strip_end:
            self._end_strip()
            start = self._take_small(need) if need < PAGE else self._take_pages(need)
        return start

    def _take_small(self, need: int) -> int | None:
        same = self._by_size.get(need)
        if same:
            start = next(reversed(same))
            self._drop(start, need)
            return start
        if self._strip + need > self._strip_end and not self._begin_strip(need):
            return None
        start = self._strip
        self._strip = start + need
        self.free -= need
        return start

    def _begin_strip(self, need: int) -> bool:
        """The smallest range that fits, or the low end of a larger one."""
        self._end_strip()
        at = bisect_left(self._sizes, need)
        if at == len(self._sizes):
            return False
        hole = self._sizes[at]
        start = next(reversed(self._by_size[hole]))
        length = min(hole, max(STRIP, need))
        self._drop(start, hole)
        if hole > length:
            self._add(start + length, hole - length)
        self._strip, self._strip_end = start, start + length
        self.free += length
        return True

    def _end_strip(self) -> None:
        """What is left of the strip is free like anything else."""
        start, length = self._strip, self._strip_end - self._strip
        self._strip = self._strip_end = 0
        if length:
            self.free -= length
            self._merge(start, length)

    def _take_pages(self, need: int) -> int | None:
        sizes = self._sizes
        at = bisect_left(sizes, need)
        # A range that is long enough may lose its ends to alignment: at most a page.
        while at < len(sizes):
            hole = sizes[at]
            for start in reversed(self._by_size[hole]):
                cut = (start + hole - need) & -PAGE
                if cut >= start:
                    self._drop(start, hole)
                    if cut > start:
                        self._add(start, cut - start)
                    if start + hole > cut + need:
                        self._add(cut + need, start + hole - cut - need)
                    return cut
            at += 1
        return None

    @classmethod
    def around(cls, size: int, taken: list[tuple[int, int]]) -> tuple[Extents, list[bool]]:
        """An arena in which these (start, size) are taken already: a restarted node finds its values again. One that
        overlaps another, or is not where `take` would put it, is refused (False)."""
        extents = cls(size)
        kept = [False] * len(taken)
        extents._drop(0, extents.size)
        at = 0
        for i in sorted(range(len(taken)), key=taken.__getitem__):
            start, length = taken[i][0], rounded(taken[i][1])
            if start < at or start + length > extents.size or start % (PAGE if length >= PAGE else GRAIN):
                continue
            if start > at:
                extents._add(at, start - at)
            at = start + length
            kept[i] = True
        if at < extents.size:
            extents._add(at, extents.size - at)
        return extents, kept

    def give(self, start: int, size: int) -> None:
        """Give back what `take(size)` returned."""
        length = rounded(size)
        if start < 0 or start + length > self.size or start in self._starts or start + length in self._ends:
            raise InvariantBroken(f"bytes {start} … {start + length} were given back twice")
        if self._strip < start + length and start < self._strip_end:
            raise InvariantBroken(f"bytes {start} … {start + length} were given back twice")
        self._merge(start, length)

    def _merge(self, start: int, length: int) -> None:
        before = self._ends.get(start)
        if before is not None:
            self._drop(before, start - before)
            length += start - before
            start = before
        after = self._starts.get(start + length)
        if after is not None:
            self._drop(start + length, after)
            length += after
        self._add(start, length)

    def holes(self) -> Iterator[tuple[int, int]]:
        """(start, end) of free ranges, largest first."""
        self._end_strip()
        for size in reversed(list(self._sizes)):
            for start in list(self._by_size.get(size, ())):
                yield start, start + size

    def check(self) -> None:
        """Raise InvariantBroken if the books do not add up. O(n log n)."""
        ranges = sorted(self._starts.items())
        total = sum(size for _, size in ranges) + self._strip_end - self._strip
        apart = all(a + n < b for (a, n), (b, _) in pairwise(ranges))
        ends = {start + size: start for start, size in ranges}
        sizes = sorted({size for _, size in ranges})
        listed = sorted((start, size) for size, starts in self._by_size.items() for start in starts)
        if not (apart and total == self.free and ends == self._ends and sizes == self._sizes and listed == ranges):
            raise InvariantBroken("free extents overlap, touch, or are counted wrongly")

    def _add(self, start: int, size: int) -> None:
        self._starts[start] = size
        self._ends[start + size] = start
        starts = self._by_size.get(size)
        if starts is None:
            self._by_size[size] = {start: None}
            insort(self._sizes, size)
        else:
            starts[start] = None
        self.free += size

    def _drop(self, start: int, size: int) -> None:
        del self._starts[start], self._ends[start + size]
        starts = self._by_size[size]
        del starts[start]
        if not starts:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self.free -= size
