"""Reads neighbouring values with one call each run and checks every slice while it is in the cache."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from anabranch.core.faults import Faults
from anabranch.store.values.live.log.direct import aligned_buffer, is_aligned, read_all
from anabranch.store.values.log_format import PAGE, align_down, align_up
from anabranch.store.values.slices import SLICE_BYTES, slice_sum

READ_BYTES = 4 << 20
"""One read. Multiple of SLICE_BYTES."""
GAP_BYTES = 64 << 10
PIECES = 256


class SegmentReader:
    """Reads into the caller's buffers: directly where buffer and offset allow, else through a buffer of this thread."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._local = threading.local()

    def read(self, fd: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """`pieces`: (offset in the file, buffer) in order, within READ_BYTES + GAP_BYTES of each other, in one read.
        Raises OSError."""
        start = align_down(pieces[0][0])
        plan = _Plan(self._stage(), start)
        for offset, view in pieces:
            plan.take(offset, view)
        read_all(fd, plan.finish(), start, self._faults)
        plan.deliver()

    def read_run(self, fd: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """`read`, or in several reads if it is one large value."""
        offset, target = pieces[0]
        if target.nbytes <= READ_BYTES:
            self.read(fd, pieces)
            return
        for at in range(0, target.nbytes, READ_BYTES):
            self.read(fd, [(offset + at, target[at : at + READ_BYTES])])

    def _stage(self) -> memoryview:
        stage: memoryview | None = getattr(self._local, "stage", None)
        if stage is None:
            stage = self._local.stage = aligned_buffer(READ_BYTES + GAP_BYTES + 4 * PAGE)
        return stage


class _Plan:
    """Buffers that cover a stretch of the file without a gap, and what to copy out of the staging buffer after."""

    def __init__(self, stage: memoryview, start: int) -> None:
        self._stage = stage
        self._at = start
        self._piece = 0
        self._fill = 0
        self._buffers: list[memoryview] = []
        self._copies: list[tuple[int, memoryview]] = []

    def take(self, offset: int, view: memoryview) -> None:
        if offset % PAGE == 0 and view.nbytes >= PAGE and is_aligned(view):
            self._cover(offset)
            self._close_piece()
            whole = align_down(view.nbytes)
            self._buffers.append(view[:whole])
            self._at += whole
            offset, view = offset + whole, view[whole:]
        if view.nbytes:
            self._cover(align_up(offset + view.nbytes))
            self._copies.append((self._fill - (self._at - offset), view))

    def finish(self) -> list[memoryview]:
        self._close_piece()
        return self._buffers

    def deliver(self) -> None:
        for at, view in self._copies:
            view[:] = self._stage[at : at + view.nbytes]

    def _cover(self, end: int) -> None:
        if end > self._at:
            self._fill += end - self._at
            self._at = end

    def _close_piece(self) -> None:
        if self._fill > self._piece:
            self._buffers.append(self._stage[self._piece : self._fill])
            self._piece = self._fill


def slices_match(value: memoryview, sums: Sequence[int], start: int, end: int) -> bool:
    """Bytes `start` (a slice's first) to `end` of a value have their sums."""
    return all(
        slice_sum(value[at : min(at + SLICE_BYTES, end)]) == sums[at // SLICE_BYTES]
        for at in range(start, end, SLICE_BYTES)
    )
