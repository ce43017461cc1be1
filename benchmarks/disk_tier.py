"""Read and write speed of the SSD tier of values beside raw aligned direct I/O of the same sizes on the same disk.

    python benchmarks/disk_tier.py [--quick] [--folder DIR] [--rounds N]

Both move the same bytes between page-aligned memory and preallocated files, alternating. Raw: a loop of os.pwritev and
os.preadv, one call a value, O_DIRECT, no checksums; its file is written once before, as the log's segments are (they
are recycled when the log is full). Ours: append and read of the value log in batches, every slice checked on the way
in; `durable` adds a flush to each batch, on both sides. The last line is one JSON object; GB/s are 10^9 bytes a second,
medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

from anabranch.store.values.contracts import Record
from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.live.log.direct import aligned_buffer
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import slice_sums

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"32 KiB": 32 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB}
BATCH_BYTES = 64 * MIB


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Raw:
    """What the disk gives to a plain loop."""

    def __init__(self, folder: str, size: int, total: int) -> None:
        self._path = os.path.join(folder, "raw.bin")
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._size, self._total = size, total
        os.posix_fallocate(self._fd, 0, total)
        block = aligned_buffer(4 * MIB)
        for at in range(0, total, block.nbytes):
            os.pwritev(self._fd, [block[: min(block.nbytes, total - at)]], at)
        os.fsync(self._fd)

    def write(self, values: Sequence[memoryview], *, durable: bool) -> None:
        self._each(values, os.pwritev, durable)

    def read(self, values: Sequence[memoryview]) -> None:
        self._each(values, os.preadv, False)

    def _each(self, values: Sequence[memoryview], call: Callable[..., int], durable: bool) -> None:
        per_batch = len(values)
        for at in range(0, self._total, self._size):
            index = at // self._size % per_batch
            if call(self._fd, [values[index]], at) != self._size:
                raise OSError("short transfer")
            if durable and index == per_batch - 1:
                os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        os.unlink(self._path)


class Ours:
    """The value log; every round writes new names, so old segments go."""

    def __init__(self, folder: str, total: int) -> None:
        self._log = ValueLog(os.path.join(folder, "log"), total + total // 4 + 16 * MIB)
        self._total = total
        self._random = random.Random(1)
        self._names: list[bytes] = []

    def records(self, values: Sequence[memoryview]) -> list[list[Record]]:
        """The node has every value's sums since it was put: they are no part of writing it to disk."""
        sums = [tuple(slice_sums(value)) for value in values]
        batches = self._total // (values[0].nbytes * len(values))
        return [
            [Record(self._random.randbytes(32), b"s" * 16, values[0].nbytes, each) for each in sums]
            for _ in range(batches)
        ]

    def write(self, batches: list[list[Record]], values: Sequence[memoryview], *, durable: bool) -> None:
        for batch in batches:
            outcomes = self._log.append(list(zip(batch, values, strict=True)), durable=durable)
            if set(outcomes) != {Outcome.OK}:
                raise SystemExit(f"append failed: {outcomes}")

    def read(self, batches: list[list[Record]], values: Sequence[memoryview]) -> None:
        for batch in batches:
            outcomes = self._log.read([record.name for record in batch], values)
            if set(outcomes) != {Outcome.OK}:
                raise SystemExit(f"read failed: {outcomes}")

    def close(self) -> None:
        self._log.close()


def measure(folder: str, size: int, total: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each, round by round; the first round of both is a warm-up."""
    raw, ours = Raw(folder, size, total), Ours(folder, total)
    speeds: dict[str, list[float]] = {}
    try:
        source = aligned_buffer(BATCH_BYTES)
        source[:] = random.Random(2).randbytes(BATCH_BYTES)
        target = aligned_buffer(BATCH_BYTES)
        values = [source[at : at + size] for at in range(0, BATCH_BYTES, size)]
        into = [target[at : at + size] for at in range(0, BATCH_BYTES, size)]
        for number in range(-1, rounds):
            batches, lasting = ours.records(values), ours.records(values)
            taken = {
                "raw write": seconds(lambda: raw.write(values, durable=False)),
                "write": seconds(lambda b=batches: ours.write(b, values, durable=False)),
                "raw durable": seconds(lambda: raw.write(values, durable=True)),
                "durable": seconds(lambda b=lasting: ours.write(b, values, durable=True)),
                "raw read": seconds(lambda: raw.read(into)),
                "read": seconds(lambda b=lasting: ours.read(b, into)),
            }
            if number >= 0:
                for name, spent in taken.items():
                    speeds.setdefault(name, []).append(total / spent / 1e9)
        if bytes(target) != bytes(source):
            raise SystemExit("what was read is not what was written")
    finally:
        raw.close()
        ours.close()
        shutil.rmtree(os.path.join(folder, "log"), ignore_errors=True)
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=".", help="where: a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="three rounds of less")
    args = parser.parse_args()
    rounds, total = (min(args.rounds, 3), 128 * MIB) if args.quick else (args.rounds, 512 * MIB)
    folder = tempfile.mkdtemp(prefix="disk-tier-", dir=args.folder)
    figures: dict[str, dict[str, float]] = {}
    try:
        for label, size in SIZES.items():
            speeds = measure(folder, size, total, rounds)
            figures[label] = {name: round(statistics.median(values), 3) for name, values in speeds.items()}
            print(label, "  ".join(f"{name} {value:.2f}" for name, value in figures[label].items()), "GB/s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kinds = ("write", "durable", "read")
    result = {
        "claim": "SSD tier against raw aligned direct I/O of the same sizes on the same disk (medians)",
        "ours": {label: {kind: row[kind] for kind in kinds} for label, row in figures.items()},
        "limit": {label: {kind: row[f"raw {kind}"] for kind in kinds} for label, row in figures.items()},
        "ratio": {label: {k: round(row[k] / row[f"raw {k}"], 3) for k in kinds} for label, row in figures.items()},
        "goal": 0.8,
        "samples": rounds,
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "platform": platform.platform()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
