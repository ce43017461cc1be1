"""How fast the lanes of one transfer are, so that a slow one leaves the last slices to the others.

Pure and not thread-safe. Used where lanes go over different rails; lanes of one rail are equally fast.
"""

from __future__ import annotations

from anabranch.transfer.spread import WEIGHT, others_are_sooner


class LanePace:
    """Lanes by number; what is under way on each is in order."""

    def __init__(self) -> None:
        self._slice_s: dict[int, float] = {}
        self._held: dict[int, int] = {}
        self._since: dict[int, float] = {}

    def expect(self, lane: int, slice_s: float) -> None:
        """What it took for a slice in a transfer before this one."""
        self._slice_s[lane] = slice_s

    def worth(self, lane: int, waiting: int, now: float) -> bool:
        """Whether the lane should take one of `waiting` slices: it would be done with it before the others were done
        with all of them. One that nobody has measured gets a single slice first."""
        own_s = self._slice_s.get(lane)
        if own_s is None:
            return not self._held.get(lane)
        others = [
            (slice_s, self._busy_s(other, slice_s, now)) for other, slice_s in self._slice_s.items() if other != lane
        ]
        return not others_are_sooner((self._held.get(lane, 0) + 1) * own_s, waiting, others)

    def _busy_s(self, lane: int, slice_s: float, now: float) -> float:
        held = self._held.get(lane, 0)
        return held * slice_s - (now - self._since[lane]) if held else 0.0

    def given(self, lane: int, now: float) -> None:
        if not self._held.get(lane):
            self._since[lane] = now
        self._held[lane] = self._held.get(lane, 0) + 1

    def arrived(self, lane: int, now: float) -> float:
        """What a slice costs there, as it looks now."""
        taken = now - self._since[lane]
        former = self._slice_s.get(lane, taken)
        self._slice_s[lane] = former + WEIGHT * (taken - former)
        self._held[lane] -= 1
        self._since[lane] = now
        return self._slice_s[lane]

    def left(self, lane: int) -> None:
        """It died or went away: the others cannot count on it."""
        for table in (self._slice_s, self._held, self._since):
            table.pop(lane, None)
