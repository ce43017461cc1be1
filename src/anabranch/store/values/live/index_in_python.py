"""A mapped index in plain Python: the twin of `index_native`, for x86 machines without a compiler, and for tests.

It keeps the protocol of `shared_index.h` by writing and reading whole aligned words in order, which is enough where the
processor keeps the order of stores and of loads (x86), and nowhere else.
"""

from __future__ import annotations

import mmap
import platform
import struct
from collections.abc import Iterator

from anabranch.store.values.live.index_file import HEADER_BYTES, LIVE, REBUILDING, RETIRED, SLOT_BYTES, IndexFile
from anabranch.store.values.scope import NAME_BYTES

_BUSY, _TAKEN, _ONE_VERSION = 1, 2, 4
_FLAGS = _BUSY | _TAKEN
_ALL = (1 << 64) - 1
_LOW = (1 << 32) - 1
_STATE, _COUNT = 5, 6
_NAME = struct.Struct("@4Q")
_SCOPE = struct.Struct("@2Q")
_FOUND = struct.Struct("@QQII")
_ENTRY = struct.Struct("@6QQQII")
_SPINS = 4
Words = tuple[int, ...]


def suits() -> bool:
    """This processor keeps the order that the twin needs."""
    return platform.machine() in ("x86_64", "AMD64")


class PythonIndex:
    """The calls of `index_native.NativeIndex`, but for `present_keys`."""

    def __init__(self, file: IndexFile, writable: bool) -> None:
        self._file = file
        self._map = mmap.mmap(file.fd, file.length, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        self._words = memoryview(self._map).cast("Q")

    def present(self, names: bytes, scope: bytes) -> bytes:
        return bytes(found[3] for found in _FOUND.iter_unpack(self.find(names, scope)))

    def find(self, names: bytes, scope: bytes) -> bytes:
        if self.state() != LIVE:
            return bytes(len(names) // NAME_BYTES * _FOUND.size)
        whose, answer = _SCOPE.unpack(scope), bytearray()
        for name in _NAME.iter_unpack(names):
            entry = self._look_up(name)
            there = entry is not None and entry[4:6] == whose
            answer += _FOUND.pack(*entry[6:]) if entry is not None and there else bytes(_FOUND.size)
        return bytes(answer)

    def still(self, name: bytes, offset: int, size: int, generation: int) -> bool:
        entry = self._look_up(_NAME.unpack(name)) if self.state() == LIVE else None
        return entry is not None and entry[6:9] == (offset, size, generation)

    def put(self, name: bytes, scope: bytes, offset: int, size: int, generation: int) -> bool:
        return self._insert((*_NAME.unpack(name), *_SCOPE.unpack(scope), offset, size, generation, 1))

    def discard(self, name: bytes) -> None:
        hole, there = self._seek(_NAME.unpack(name))
        if not there:
            return
        at = self._next(hole)
        while self._words[self._word(at)] & _TAKEN:
            home = self._home(self._words[self._word(at) + 1])
            stays = hole < home <= at if hole < at else home > hole or home <= at
            entry = None if stays else self._read(at)
            if entry is not None:
                self._write(hole, entry)
                hole = at
            at = self._next(at)
        self._clear(hole)
        self._words[_COUNT] -= 1

    def entries(self, at: int, limit: int) -> tuple[bytes, int]:
        found: list[bytes] = []
        while at < self._file.slots and len(found) < limit:
            entry = self._read(at)
            if entry is not None:
                found.append(_ENTRY.pack(*entry))
            at += 1
        return b"".join(found), at

    def rebuild(self) -> None:
        self._words[_STATE] = REBUILDING
        kept = [entry for at in range(self._file.slots) if (entry := self._read(at)) is not None]
        for at in range(self._file.slots):
            self._clear(at)
        self._words[_COUNT] = 0
        for entry in kept:
            if not self._seek(entry[:4])[1]:
                self._insert(entry)
        self._words[_STATE] = LIVE

    def retire(self) -> None:
        self._words[_STATE] = RETIRED

    def state(self) -> int:
        return self._words[_STATE]

    def count(self) -> int:
        return self._words[_COUNT]

    def unmap(self) -> None:
        self._words.release()
        self._map.close()

    def _word(self, at: int) -> int:
        return (HEADER_BYTES + at * SLOT_BYTES) // 8

    def _size(self, at: int) -> int:
        return self._word(self._file.slots) + at

    def _home(self, first: int) -> int:
        scattered = ((first ^ self._file.secret) * self._file.factor) & _ALL
        return ((scattered >> 32) * self._file.slots) >> 32

    def _next(self, at: int) -> int:
        return 0 if at + 1 == self._file.slots else at + 1

    def _probe(self, first: int) -> Iterator[int]:
        at = self._home(first)
        for _ in range(self._file.slots):
            yield at
            at = self._next(at)

    def _look_up(self, name: Words) -> Words | None:
        for at in self._probe(name[0]):
            where = self._word(at)
            if not self._words[where] & _FLAGS:
                return None
            if self._words[where + 1] == name[0]:
                entry = self._read(at)
                if entry is not None and entry[:4] == name:
                    return entry
        return None

    def _read(self, at: int) -> Words | None:
        """Name, scope, offset, size, generation, 1; None: empty, or somebody writes there."""
        where = self._word(at)
        for _ in range(_SPINS):
            state = self._words[where]
            if state & _FLAGS != _TAKEN:
                continue
            entry = (*self._words[where + 1 : where + 8].tolist(), self._words[self._size(at)], state >> 32, 1)
            if self._words[where] == state:
                return entry
        return None

    def _write(self, at: int, entry: Words) -> None:
        words, where = self._words, self._word(at)
        state = words[where]
        words[where] = state | _BUSY
        for index in range(7):
            words[where + 1 + index] = entry[index]
        words[self._size(at)] = entry[7]
        words[where] = entry[8] << 32 | (((state & _LOW & ~_FLAGS) + _ONE_VERSION) & _LOW) | _TAKEN

    def _clear(self, at: int) -> None:
        where = self._word(at)
        self._words[where] = ((self._words[where] & _LOW & ~_FLAGS) + _ONE_VERSION) & _LOW

    def _seek(self, name: Words) -> tuple[int, bool]:
        for at in self._probe(name[0]):
            where = self._word(at)
            if not self._words[where] & _TAKEN:
                return at, False
            if tuple(self._words[where + 1 : where + 5]) == name:
                return at, True
        return 0, False

    def _insert(self, entry: Words) -> bool:
        at, there = self._seek(entry[:4])
        if not there:
            if self._words[_COUNT] >= self._file.capacity:
                return False
            self._words[_COUNT] += 1
        self._write(at, entry)
        return True
