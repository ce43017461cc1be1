"""Whole, page-aligned reads and writes of buffers in memory."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

from anabranch.core.faults import Faults
from anabranch.core.live.buffers import address_of
from anabranch.store.values.log_format import PAGE

MAX_IO_BYTES = 16 << 20
MAX_BUFFERS = 512


def is_aligned(view: memoryview) -> bool:
    """The buffer begins at a page (read-only ones too, which ctypes' from_buffer refuses)."""
    return address_of(view) % PAGE == 0


def aligned_buffer(size: int) -> memoryview:
    """Page-aligned memory of this program's own, zeroed; it goes with the last reference."""
    return memoryview(mmap.mmap(-1, max(size, PAGE)))[:size]


def write_all(fd: int, buffers: Sequence[memoryview], offset: int, faults: Faults) -> None:
    """Raises OSError if not every byte could be written."""
    effect = faults.at("log.write")
    if effect == "fail":
        raise OSError(errno.EIO, "input/output error")
    if effect == "flip":
        damaged = aligned_buffer(buffers[0].nbytes)
        damaged[:] = buffers[0]
        damaged[damaged.nbytes // 2] ^= 1
        buffers = [damaged, *buffers[1:]]
    if effect == "short":
        os.pwritev(fd, [buffers[0][: buffers[0].nbytes // 2 // PAGE * PAGE]], offset)
        raise OSError(errno.EIO, "only a part was written")
    left = list(buffers)
    while left:
        done = os.pwritev(fd, left, offset)
        if done <= 0:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        left = _after(left, done)


def read_all(fd: int, buffers: Sequence[memoryview], offset: int, faults: Faults) -> None:
    """Where the file ends early the rest of the buffers stays as it is. Raises OSError."""
    effect = faults.at("log.read")
    if effect == "fail":
        raise OSError(errno.EIO, "input/output error")
    left = list(buffers)
    if effect == "short":
        left = [view[: view.nbytes // 2 // PAGE * PAGE] for view in left[:1]]
    while left:
        done = os.preadv(fd, left, offset)
        if done <= 0:
            break
        offset += done
        left = _after(left, done)
    if effect == "flip":
        buffers[0][buffers[0].nbytes // 2] ^= 1


def _after(buffers: list[memoryview], done: int) -> list[memoryview]:
    """The buffers without their first `done` bytes."""
    for index, view in enumerate(buffers):
        if done < view.nbytes:
            return [view[done:], *buffers[index + 1 :]]
        done -= view.nbytes
    return []
