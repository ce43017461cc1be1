"""Reads many values: neighbours in one read, and where that pays in two threads at once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from functools import cached_property

import msgspec

from anabranch.core.errors import IntegrityError, StaleLease
from anabranch.core.faults import Faults
from anabranch.store.values.contracts import Cipher
from anabranch.store.values.live.log.direct import aligned_buffer
from anabranch.store.values.live.log.files import LogFiles
from anabranch.store.values.live.log.reader import GAP_BYTES, PIECES, READ_BYTES, SegmentReader, slices_match
from anabranch.store.values.log import Item, Piece, Run, Segment, plan_reads
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import SLICE_BYTES
from anabranch.transfer.live.tally import Tally
from anabranch.transfer.live.workers import Workers

SPLIT_BYTES = 1 << 20


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
        total = sum(item.stored for _, item in placed)
        # Two threads: one keeps the device busy while the other checks sums.
        half = max(align_slice(total // 2), SLICE_BYTES) if total >= SPLIT_BYTES else READ_BYTES
        size = min(half, READ_BYTES)
        plan = plan_reads(placed, gap_bytes=GAP_BYTES, run_bytes=size, pieces=PIECES, part_bytes=size)
        order = _Order(deque(plan), wishes)
        if len(plan) < 2 or total < SPLIT_BYTES:
            self._work(order)
        else:
            self._work_together(order)
        for n, wish in enumerate(wishes):
            outcomes[wish.index] = order.outcome(n)

    def _work_together(self, order: _Order) -> None:
        """If the second thread is stuck in a hung device, the next callers do without it: it harms only the call whose
        run it has."""
        if not self._second_free.acquire(blocking=False):
            self._work(order)
            return
        done = threading.Event()

        def second() -> None:
            try:
                self._work(order)
            finally:
                self._second_free.release()
                done.set()

        self._second.submit(second)
        self._work(order)
        done.wait()

    def _work(self, order: _Order) -> None:
        while (run := order.next()) is not None:
            try:
                self._read(run, order)
            except OSError:
                self._tally.add("log_read_errors")
                for piece in run.pieces:
                    order.failed[piece.wish] = Outcome.UNREACHABLE

    def _read(self, run: Run, order: _Order) -> None:
        wishes = [order.wishes[piece.wish] for piece in run.pieces]
        targets = [
            aligned_buffer(piece.length) if wish.sealed else wish.view[piece.start : piece.start + piece.length]
            for piece, wish in zip(run.pieces, wishes, strict=True)
        ]
        with self._files.use(run.segment) as fd:
            self._reader.read_run(fd, [(p.offset, target) for p, target in zip(run.pieces, targets, strict=True)])
        self._tally.add("log_reads")
        self._tally.add("log_read_bytes", sum(target.nbytes for target in targets))
        for piece, wish, target in zip(run.pieces, wishes, targets, strict=True):
            outcome = self._checked(wish, piece, target)
            if outcome is Outcome.OK:
                order.good.append(piece.wish)
            else:
                order.failed[piece.wish] = outcome

    def _checked(self, wish: Wish, piece: Piece, target: memoryview) -> Outcome:
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
        good = slices_match(wish.view, record.sums, piece.start, piece.start + piece.length)
        return Outcome.OK if good else Outcome.DAMAGED


class _Order:
    """Runs that are still to be read, and what became of the others. Threads share it: each list and dict operation is
    one step."""

    def __init__(self, runs: deque[Run], wishes: list[Wish]) -> None:
        self.wishes = wishes
        self.good: list[int] = []
        self.failed: dict[int, Outcome] = {}
        self._runs = runs
        self._pieces = Counter(piece.wish for run in runs for piece in run.pieces)

    def next(self) -> Run | None:
        try:
            return self._runs.popleft()
        except IndexError:
            return None

    @cached_property
    def _read(self) -> Counter[int]:
        return Counter(self.good)

    def outcome(self, wish: int) -> Outcome:
        """Once everything was read."""
        whole = self._read[wish] == self._pieces[wish]
        return self.failed.get(wish, Outcome.OK if whole else Outcome.UNREACHABLE)


def align_slice(size: int) -> int:
    return -(-size // SLICE_BYTES) * SLICE_BYTES
