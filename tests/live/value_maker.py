"""Values whose bytes follow from their names, for tests of the tiers below DRAM."""

from __future__ import annotations

import random

from anabranch.store.values.contracts import Record
from anabranch.store.values.live.log.direct import aligned_buffer
from anabranch.store.values.slices import slice_sums

SCOPE = b"scope-of-tests.."


def content(name: bytes, size: int) -> bytes:
    return (name * (size // len(name) + 1))[:size]


def made(name: bytes, size: int, *, scope: bytes = SCOPE, aligned: bool = False) -> tuple[Record, memoryview]:
    data = content(name, size)
    view = memoryview(data)
    if aligned:
        view = aligned_buffer(size)
        view[:] = data
    return Record(name, scope, size, tuple(slice_sums(data)), b""), view


class Names:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def values(self, sizes: list[int], *, scope: bytes = SCOPE) -> list[tuple[Record, memoryview]]:
        """One value a size; every other one lies page-aligned."""
        return [made(self.random.randbytes(32), n, scope=scope, aligned=i % 2 == 0) for i, n in enumerate(sizes)]
