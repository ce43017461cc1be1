"""What a successor of a killed node needs to find its arena's values again: a record of each in shared memory.

    header    magic, version, arena bytes, capacity; how many records were ever used
    records   [capacity] of RECORD bytes, by entry; the generation is written last, 0: no value
    sums      slice sums of values with more than INLINE_SUMS slices

Each record carries the xxh3 of its fields and sums: a torn one is no record.
**Covers** writing, erasing and reading back. **Does not cover** whether the bytes are still right: receivers check.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct

import msgspec
import xxhash

from anabranch.paging.extents import Extents
from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry
from anabranch.store.values.slices import SLICE_BYTES, slice_count

MAGIC = b"ANBRVREC"
VERSION = 1
INLINE_SUMS = 4
_HEADER = struct.Struct("<8sIIQQ")  # magic, version, pad, arena bytes, capacity
_USED_AT = 64
_GENERATION_AT = 72
GENERATIONS_AT_ONCE = 1 << 16
_BODY = struct.Struct("<QQQQ32s16s32s4Q")  # generation, offset, size, sums at, name, scope, parent, sums
_SUM = struct.Struct("<Q")
RECORD = 160
RECORDS_AT = 4096


class Found(msgspec.Struct, frozen=True):
    """A value of a former life of this node."""

    slot: int
    offset: int
    generation: int
    record: Record


class NodeRecords:
    """`capacity`: how many entries have a record; those beyond it are forgotten with the process. One writer."""

    def __init__(self, path: str, arena_bytes: int, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self._sums_at = RECORDS_AT + -(-capacity * RECORD // 4096) * 4096
        self._sums_bytes = max(1 << 16, -(-arena_bytes // SLICE_BYTES) * 8 * 4)
        self._sums = Extents(self._sums_bytes)
        self._sums_of: dict[int, tuple[int, int]] = {}
        size = self._sums_at + self._sums_bytes
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # The arena's lock guards this file too; this one only tells other programs.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            head = _HEADER.pack(MAGIC, VERSION, 0, arena_bytes, capacity)
            self.kept = os.fstat(fd).st_size == size and os.pread(fd, _HEADER.size, 0) == head
            if not self.kept:
                os.ftruncate(fd, 0)
                os.ftruncate(fd, size)
                os.pwrite(fd, head, 0)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        (self._reserved,) = _SUM.unpack_from(self._view, _GENERATION_AT)
        self.first_generation = self._reserved + 1
        """Above all that a former process used."""
        self._used = min(_SUM.unpack_from(self._view, _USED_AT)[0], capacity)

    def write(self, entry: Entry, scope: bytes) -> None:
        slot, generation, sums = entry.slot, entry.generation, entry.sums
        if generation > self._reserved:
            self._reserved = generation + GENERATIONS_AT_ONCE
            _SUM.pack_into(self._view, _GENERATION_AT, self._reserved)
        if slot >= self.capacity:
            return
        if slot >= self._used:
            self._used = slot + 1
            _SUM.pack_into(self._view, _USED_AT, self._used)
        place = 0
        if len(sums) > INLINE_SUMS:
            start = self._sums.take(8 * len(sums))
            if start is None:
                return
            place = start
            self._sums_of[slot] = (start, 8 * len(sums))
            struct.pack_into(f"<{len(sums)}Q", self._view, self._sums_at + start, *sums)
            inline: tuple[int, ...] = (0,) * INLINE_SUMS
        else:
            inline = sums + (0,) * (INLINE_SUMS - len(sums))
        body = _BODY.pack(generation, entry.offset, entry.size, place, entry.name, scope, entry.parent, *inline)
        at = RECORDS_AT + slot * RECORD
        check = _SUM.pack(_checksum(body, sums))
        self._view[at + 8 : at + _BODY.size + 8] = body[8:] + check
        self._view[at : at + 8] = body[:8]

    def erase(self, slot: int) -> None:
        """Before the extent is used again."""
        if slot < self.capacity:
            at = RECORDS_AT + slot * RECORD
            self._view[at : at + 8] = _NOTHING
            if self._sums_of:
                sums = self._sums_of.pop(slot, None)
                if sums is not None:
                    self._sums.give(*sums)

    def take_all(self) -> list[Found]:
        """The whole records that a former process left; they are erased here, whoever adopts them writes them again."""
        found = []
        for slot in range(self._used):
            at = RECORDS_AT + slot * RECORD
            if self._view[at : at + 8] == _NOTHING:
                continue
            one = self._found(slot, at)
            if one is not None:
                found.append(one)
            self._view[at : at + 8] = _NOTHING
        return found

    def close(self, *, remove: bool = False) -> None:
        self._view.release()
        self._map.close()
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _found(self, slot: int, at: int) -> Found | None:
        body = bytes(self._view[at : at + _BODY.size])
        generation, offset, size, place, name, scope, parent, *inline = _BODY.unpack(body)
        count = slice_count(size)
        if count <= INLINE_SUMS:
            sums = tuple(inline[:count])
        elif place + 8 * count <= self._sums_bytes:
            sums = struct.unpack_from(f"<{count}Q", self._view, self._sums_at + place)
        else:
            return None
        (check,) = _SUM.unpack_from(self._view, at + _BODY.size)
        if check != _checksum(body, sums):
            return None
        parent = b"" if parent == bytes(32) else parent
        return Found(slot, offset, generation, Record(name, scope, size, sums, parent))


_NOTHING = bytes(8)


def _checksum(body: bytes, sums: tuple[int, ...]) -> int:
    if len(sums) > INLINE_SUMS:
        body += struct.pack(f"<{len(sums)}Q", *sums)
    return int(xxhash.xxh3_64_intdigest(body))
