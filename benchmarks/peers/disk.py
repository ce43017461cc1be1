"""The SSD tier beside raw aligned direct I/O: the same bytes, the same folder, one after the other."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

CHUNK = 4 << 20
THREADS = 2


def speeds(folder: Path, total: int) -> dict[str, dict[str, float]]:
    """{"write": {"raw": GB/s, "anabranch": GB/s}, "read": …}; a durable write ends when the disk has it."""
    raw_write, raw_read = raw(folder / "raw", total)
    return {"write": {"raw": raw_write}, "read": {"raw": raw_read}}


def raw(path: Path, total: int) -> tuple[float, float]:
    """GB/s of writing and reading one preallocated file in chunks of 4 MiB, two requests under way, O_DIRECT."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    buffers = [mmap.mmap(-1, CHUNK) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(CHUNK)
    try:
        os.posix_fallocate(file, 0, total)

        def write(buffer: mmap.mmap, at: int) -> None:
            os.pwrite(file, buffer, at)

        def read(buffer: mmap.mmap, at: int) -> None:
            os.preadv(file, [buffer], at)

        written = timed(total, buffers, write, lambda: os.fdatasync(file))
        return written, timed(total, buffers, read, lambda: None)
    finally:
        os.close(file)
        path.unlink()


def timed(
    total: int, buffers: list[mmap.mmap], move: Callable[[mmap.mmap, int], None], end: Callable[[], None]
) -> float:
    def run(first: int) -> None:
        for at in range(first * CHUNK, total, CHUNK * THREADS):
            move(buffers[first], at)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(THREADS)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    end()
    return total / (time.perf_counter() - begun) / 1e9
