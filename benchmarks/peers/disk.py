"""The SSD tier beside raw aligned direct I/O: the same bytes, the same folder, one after the other."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from anabranch.store.values.contracts import Record
from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import slice_sums

VALUE = 1 << 20
BATCH = 32
CHUNK = 4 << 20
THREADS = 2


def speeds(folder: Path, total: int, *, ours_first: bool = False) -> dict[str, dict[str, float]]:
    """{"write": {"raw": GB/s, "anabranch": GB/s}, "read": …}; a write ends when the disk has it. Ours: values of 1 MiB
    in batches of 32, checksums checked on reading."""
    if ours_first:
        own, plain = tier(folder / "tier", total), raw(folder / "raw", total)
    else:
        plain, own = raw(folder / "raw", total), tier(folder / "tier", total)
    return {what: {"raw": plain[index], "anabranch": own[index]} for index, what in enumerate(("write", "read"))}


def tier(folder: Path, total: int) -> tuple[float, float]:
    memory = mmap.mmap(-1, BATCH * VALUE)
    memory[:] = os.urandom(BATCH * VALUE)
    view = memoryview(memory)
    values = [view[at : at + VALUE] for at in range(0, BATCH * VALUE, VALUE)]
    sums = [tuple(slice_sums(value)) for value in values]
    batches = [
        [(Record(os.urandom(32), bytes(16), VALUE, sums[item]), values[item]) for item in range(BATCH)]
        for _ in range(total // VALUE // BATCH)
    ]
    log = ValueLog(str(folder), 2 * total)
    try:
        begun = time.perf_counter()
        for batch in batches:
            outcomes = log.append(batch, durable=batch is batches[-1])
            if any(outcome is not Outcome.OK for outcome in outcomes):
                raise RuntimeError(f"the SSD tier did not take a value: {outcomes}")
        written = total / (time.perf_counter() - begun) / 1e9
        begun = time.perf_counter()
        for batch in batches:
            outcomes = log.read([record.name for record, _ in batch], values)
            if any(outcome is not Outcome.OK for outcome in outcomes):
                raise RuntimeError(f"the SSD tier did not give a value: {outcomes}")
        return written, total / (time.perf_counter() - begun) / 1e9
    finally:
        log.close()
        shutil.rmtree(folder)


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
