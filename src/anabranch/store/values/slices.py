"""How a value is cut for the wire, and its checksums.

A value of n bytes is slices of SLICE_BYTES, the last one shorter; an empty value has none. Every slice has its own
xxh3_64, checked by whoever receives it while the bytes are still in its cache; the value's sum covers length and slice
sums. Measured over loopback (pages sent by reference, two requests under way): 512 KiB is where throughput peaks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import xxhash

SLICE_BYTES = 512 << 10
Buffer = bytes | bytearray | memoryview


def slice_count(size: int) -> int:
    return -(-size // SLICE_BYTES)


def slice_bounds(size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of each slice."""
    return ((at, min(at + SLICE_BYTES, size)) for at in range(0, size, SLICE_BYTES))


def slice_sum(data: Buffer) -> int:
    """xxh3_64 of one slice; no copy is made."""
    return int(xxhash.xxh3_64_intdigest(data))


def slice_sums(value: Buffer) -> list[int]:
    view = memoryview(value)
    return [slice_sum(view[start:end]) for start, end in slice_bounds(view.nbytes)]


def value_sum(size: int, sums: Sequence[int]) -> int:
    """What tells two values apart: xxh3_64 of little-endian size and slice sums."""
    return int(xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums) + 1}Q", size, *sums)))
