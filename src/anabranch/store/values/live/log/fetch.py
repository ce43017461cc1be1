"""Reads many values: neighbours in one read, and where that pays in two threads at once."""

from __future__ import annotations

import threading
from collections import deque

import msgspec

from anabranch.core.errors import IntegrityError, StaleLease
from anabranch.core.faults import Faults
from anabranch.store.values.contracts import Cipher
from anabranch.store.values.live.log.direct import aligned_buffer
from anabranch.store.values.live.log.files import LogFiles
from anabranch.store.values.live.log.reader import GAP_BYTES, PIECES, READ_BYTES, SegmentReader, slices_match
from anabranch.store.values.log import Item, Run, Segment, plan_reads
from anabranch.store.values.outcome import Outcome
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.live.workers import Workers

SPLIT_BYTES = 2 << 20


class Wish(msgspec.Struct, eq=False, gc=False):
    """Value `item` into `view`; `index` is its place in the caller's batch."""

    index: int
    item: Item
    segment: Segment
    view: memoryview

    @property
    def sealed(self) -> bool:
        return self.item.stored != self.item.record.size


class Fetch:
    def __init__(self, files: LogFiles, cipher: Cipher | None, tally: Tally, faults: Faults) -> None:
        self._files = files
        self._cipher = cipher
        self._tally = tally
        self._reader = SegmentReader(faults)
        self._second = Workers("log-read", 1)
        self._second_free = threading.Semaphore(1)

    def close(self) -> None:
        self._second.close(timeout_s=1.0)

    def fetch(self, wishes: list[Wish], outcomes: list[Outcome]) -> None:
        """Set the outcome of every wish."""
        placed = [(n, wish.item) for n, wish in enumerate(wishes) if wish.item.stored]
        for wish in wishes:
            if not wish.item.stored:
                outcomes[wish.index] = Outcome.OK
        runs = deque(plan_reads(placed, gap_bytes=GAP_BYTES, run_bytes=READ_BYTES, pieces=PIECES))
        total = sum(item.stored for _, item in placed)
        # A second reader keeps the device busy while the first one checks sums. If it is stuck in a hung device, the
        # next callers do without it: it harms only the call whose run it has.
        if len(runs) < 2 or total < SPLIT_BYTES or not self._second_free.acquire(blocking=False):
            self._work(runs, wishes, outcomes)
            return
        done = threading.Event()

        def second() -> None:
            try:
                self._work(runs, wishes, outcomes)
            finally:
                self._second_free.release()
                done.set()

        self._second.submit(second)
        self._work(runs, wishes, outcomes)
        done.wait()

    def _work(self, runs: deque[Run], wishes: list[Wish], outcomes: list[Outcome]) -> None:
        while True:
            try:
                run = runs.popleft()
            except IndexError:
                return
            mine = [wishes[piece.wish] for piece in run.pieces]
            try:
                for wish, outcome in zip(mine, self._read(run, mine), strict=True):
                    outcomes[wish.index] = outcome
            except OSError:
                self._tally.add("log_read_errors")
                for wish in mine:
                    outcomes[wish.index] = Outcome.UNREACHABLE

    def _read(self, run: Run, wishes: list[Wish]) -> list[Outcome]:
        targets = [aligned_buffer(w.item.stored)[: w.item.stored] if w.sealed else w.view for w in wishes]
        with self._files.use(run.segment) as fd:
            self._tally.add("log_reads")
            self._tally.add("log_read_bytes", sum(target.nbytes for target in targets))
            if len(wishes) == 1 and targets[0].nbytes > READ_BYTES:
                return [self._read_large(fd, wishes[0], targets[0])]
            self._reader.read(fd, [(w.item.offset, target) for w, target in zip(wishes, targets, strict=True)])
        return [self._checked(wish, target) for wish, target in zip(wishes, targets, strict=True)]

    def _read_large(self, fd: int, wish: Wish, target: memoryview) -> Outcome:
        at, good = 0, True
        for end in self._reader.chunks(fd, wish.item.offset, target):
            if not wish.sealed:
                good = good and slices_match(target, wish.item.record.sums, at, end)
            at = end
        if wish.sealed:
            return self._checked(wish, target)
        return Outcome.OK if good else Outcome.DAMAGED

    def _checked(self, wish: Wish, target: memoryview) -> Outcome:
        record = wish.item.record
        if wish.sealed:
            if self._cipher is None:
                return Outcome.STALE
            try:
                wish.view[:] = self._cipher.open(record, target)
            except StaleLease:
                return Outcome.STALE
            except IntegrityError:
                return Outcome.DAMAGED
        return Outcome.OK if slices_match(wish.view, record.sums, 0, record.size) else Outcome.DAMAGED
