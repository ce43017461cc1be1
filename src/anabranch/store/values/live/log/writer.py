"""Writes values one behind the other into a segment: large aligned ones from where they lie, small ones packed."""

from __future__ import annotations

from anabranch.core.faults import Faults
from anabranch.store.values.live.log.direct import MAX_BUFFERS, MAX_IO_BYTES, aligned_buffer, is_aligned, write_all
from anabranch.store.values.log_format import PAGE, align_down, align_up

STAGE_BYTES = 4 << 20
DIRECT_BYTES = 64 << 10


def wants_page(data: memoryview, stored: int) -> bool:
    """Such a value is written from where it lies and begins a page of its own; the others are copied and packed. (A
    value of less than 64 KiB that does not fill its last page would waste too much of it.)"""
    return stored >= PAGE and (stored % PAGE == 0 or stored >= DIRECT_BYTES) and is_aligned(data)


class SegmentWriter:
    """One open segment's data. Offsets only grow. `flush` writes what is pending; the last page, if not full, is kept
    and written again with what comes next: its old bytes are the same in both, so a torn write harms none of them."""

    def __init__(self, faults: Faults, cursor: int = 0, last_page: bytes = b"") -> None:
        self._faults = faults
        self._stage = aligned_buffer(STAGE_BYTES + 2 * PAGE)
        self._start = align_down(cursor)  # file offset of the first pending byte
        self._end = cursor
        self._stage[: len(last_page)] = last_page
        self._piece = 0  # where in the stage the current piece begins
        self._fill = cursor - self._start  # … and ends
        self._pending: list[memoryview] = []
        self._pending_bytes = 0

    def add(self, fd: int, offset: int, data: memoryview, *, direct: bool) -> None:
        """`data` must stay as it is until `flush`. Raises OSError."""
        if direct:
            self._pad_to(align_up(self._end))
            self._close_piece()
            whole = align_down(data.nbytes)
            for at in range(0, whole, MAX_IO_BYTES):
                self._push(fd, data[at : min(at + MAX_IO_BYTES, whole)])
            self._end = offset + whole
            data = data[whole:]
        while data.nbytes:
            room = STAGE_BYTES - self._fill
            if room <= 0:
                self.flush(fd)
                continue
            part = data[:room]
            self._stage[self._fill : self._fill + part.nbytes] = part
            self._fill += part.nbytes
            self._end += part.nbytes
            data = data[part.nbytes :]

    def flush(self, fd: int) -> None:
        """Raises OSError; what was pending is then lost and must not be described by any frame."""
        end = self._end
        self._pad_to(align_up(end))
        self._close_piece()
        pending, start = self._pending, self._start
        tail = align_down(end)
        last = bytes(self._stage[self._fill - PAGE : self._fill]) if end != tail else b""
        self._pending, self._pending_bytes = [], 0
        self._start, self._end = tail, end
        try:
            if pending:
                write_all(fd, pending, start, self._faults)
        finally:
            self._stage[: len(last)] = last
            self._piece, self._fill = 0, end - tail

    def _push(self, fd: int, view: memoryview) -> None:
        """Only whole pages get here, so a write may end behind any of them."""
        self._pending.append(view)
        self._pending_bytes += view.nbytes
        if self._pending_bytes >= MAX_IO_BYTES or len(self._pending) >= MAX_BUFFERS:
            pending, start = self._pending, self._start
            self._start += self._pending_bytes
            self._pending, self._pending_bytes = [], 0
            self._piece = self._fill = 0
            write_all(fd, pending, start, self._faults)

    def _pad_to(self, end: int) -> None:
        count = end - self._end
        self._stage[self._fill : self._fill + count] = bytes(count)
        self._fill += count
        self._end = end

    def _close_piece(self) -> None:
        if self._fill > self._piece:
            self._pending.append(self._stage[self._piece : self._fill])
            self._pending_bytes += self._fill - self._piece
            self._piece = self._fill
