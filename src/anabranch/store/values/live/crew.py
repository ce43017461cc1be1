"""Threads that work on more lanes to a node beside the caller, for a transfer that is worth the hand-off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from anabranch.core.errors import AnabranchError
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.lanes import LanePool
from anabranch.transfer.live.workers import Workers

WORTH_BYTES = 4 << 20
"""A transfer of fewer bytes stays on the caller's lane."""


class Crew:
    """`work(lane, number)` runs on each thread, `lost(number)` (under `condition`) if its lane died meanwhile. Numbers
    start at 1; the caller's lane is 0."""

    def __init__(
        self,
        pool: LanePool,
        workers: Workers,
        size: int,
        condition: threading.Condition,
        call: Call,
        work: Callable[[Lane, int], None],
        lost: Callable[[int], None],
    ) -> None:
        self.active = 0
        self._pool, self._workers, self._size = pool, workers, size
        self._condition, self._call, self._work, self._lost = condition, call, work, lost
        self._lanes: set[Lane] = set()
        self._called = self._ended = 0
        self._stopped = False

    def call_in(self) -> None:
        """Under `condition`: everybody who is not at work already, or about to be."""
        while self._called - self._ended < self._size and not self._stopped:
            self._called += 1
            if not self._workers.submit(partial(self._run, self._called)):
                return

    def leave(self) -> None:
        """When this returns nobody of the crew touches a buffer any more."""
        with self._condition:
            self._stopped = True
            while self.active:
                for lane in self._lanes:
                    lane.shut()
                self._condition.wait(0.5)
        # Whoever made this crew is referenced by its own methods, and through it the caller's buffers.
        del self._work, self._lost

    def wait(self) -> None:
        """Under `condition`: until somebody has something to say."""
        self._condition.wait(max(0.001, self._call.left_s))

    def _run(self, number: int) -> None:
        with self._condition:
            # All threads may be busy for long: who has not begun yet is not waited for.
            if self._stopped:
                return
            self.active += 1
        lane: Lane | None = None
        well = False
        try:
            lane = self._pool.take(self._call)
            with self._condition:
                self._lanes.add(lane)
                stopped = self._stopped
            if not stopped:
                self._work(lane, number)
            well = True
        except AnabranchError:
            pass  # the caller's lane goes on alone, and is the one that reports
        finally:
            with self._condition:
                if lane is not None:
                    self._lanes.discard(lane)
                if not well:
                    self._lost(number)
                self.active -= 1
                self._ended += 1
                self._condition.notify_all()
            if lane is not None:
                (self._pool.give if well else self._pool.drop)(lane, self._call)
