"""One call of a client: until when it may take, and the way to end it early."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from anabranch.core.errors import Unavailable

if TYPE_CHECKING:
    from anabranch.store.values.live.lane import Lane


class Call:
    """`deadline` (monotonic) bounds the call, `patience_s` each wait for one node."""

    __slots__ = ("_lanes", "cancelled", "deadline", "patience_s", "trace")

    def __init__(self, timeout_s: float, patience_s: float = float("inf")) -> None:
        self.deadline = time.monotonic() + timeout_s
        self.patience_s = patience_s
        self.cancelled = False
        self.trace = ""
        """The trace that it belongs to (`request_spans`)."""
        self._lanes: set[Lane] = set()

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def over(self) -> bool:
        return self.cancelled or self.left_s <= 0

    def hold(self, lane: Lane) -> None:
        """The call works on this lane from now on. Raises Unavailable if it was cancelled."""
        self._lanes.add(lane)
        if self.cancelled:
            raise Unavailable("the call was cancelled")
        lane.until(self.deadline, self.patience_s)
        if lane.trace != self.trace:
            lane.follow(self.trace)

    def release(self, lane: Lane) -> None:
        self._lanes.discard(lane)

    def cancel(self) -> None:
        """Every wait of the call ends at once, and nothing is begun any more. Any thread may call it."""
        self.cancelled = True
        for lane in list(self._lanes):
            lane.shut()
