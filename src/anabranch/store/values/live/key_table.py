"""The directory's table, compiled: 40 bytes an entry in 4,096 parts that grow one at a time (`key_table.h`).

**See also** `store.values.key_table`, its twin in plain Python.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Iterable

from anabranch.core.errors import InvalidInput, Overloaded
from anabranch.store.values.contracts import KeyTable
from anabranch.store.values.key_table import HOLDERS, MAX_MEMBER, DictKeyTable, check, known
from anabranch.store.values.live.native import fresh_bytes, library
from anabranch.store.values.scope import NAME_BYTES

PARTS = 4096
_AT_ONCE = 4096 * NAME_BYTES


def make_key_table() -> KeyTable:
    native = library()
    return DictKeyTable() if native is None else CompiledKeyTable(native)


class CompiledKeyTable:
    """`contracts.KeyTable`. Thread-safe; a call with many names is atomic for each 4,096 of them. Raises InvalidInput
    for a member, tiers or names that cannot be, Overloaded if there is no memory to grow."""

    def __init__(self, native: ctypes.PyDLL) -> None:
        self._native = native
        self._table = native.table_open(os.urandom(16))
        if not self._table:
            raise Overloaded("no memory for the table of keys")
        weakref.finalize(self, native.table_close, self._table).atexit = False

    def add(self, member: int, tier: int, names: bytes) -> int:
        check(names, member, tier)
        fresh = 0
        for part in _parts(names):
            added = self._native.table_add(self._table, member, tier, part, len(part) // NAME_BYTES)
            if added < 0:
                raise Overloaded(f"no memory for more than {len(self)} keys; add directory shards")
            fresh += added
        return fresh

    def discard(self, member: int, tier: int, names: bytes) -> int:
        check(names, member, tier)
        call, table = self._native.table_discard, self._table
        return sum(call(table, member, tier, part, len(part) // NAME_BYTES) for part in _parts(names))

    def places(self, names: bytes) -> bytes:
        check(names)
        if len(names) > _AT_ONCE:
            return b"".join(map(self.places, _parts(names)))
        count = len(names) // NAME_BYTES
        answer: bytes = fresh_bytes(None, count * HOLDERS * 2)
        self._native.table_places(self._table, names, count, answer)
        return answer

    def held(self, members: Iterable[int], at: int, count: int) -> tuple[bytes, int]:
        used, end = self._span(at, count)
        names: bytes = fresh_bytes(None, used * NAME_BYTES)
        found = self._native.table_held(self._table, _bits(members), at, end, names)
        return names[: found * NAME_BYTES], end % PARTS

    def sweep(self, dead: Iterable[int], at: int, count: int) -> int:
        _, end = self._span(at, count)
        self._native.table_sweep(self._table, _bits(dead), at, end)
        return end % PARTS

    def forget(self, member: int) -> None:
        self._native.table_sweep(self._table, _bits((member,)), 0, PARTS)

    def __len__(self) -> int:
        return int(self._native.table_count(self._table))

    @property
    def memory_bytes(self) -> int:
        return int(self._native.table_bytes(self._table))

    def _span(self, at: int, count: int) -> tuple[int, int]:
        if not 0 <= at < PARTS:
            raise InvalidInput(f"position {at} is none that this table gave")
        end = ctypes.c_uint32()
        used = self._native.table_span(self._table, at, max(count, 1), ctypes.byref(end))
        return used, end.value


def _parts(names: bytes) -> list[bytes]:
    """A call is kept short, so that other threads get their turn."""
    if len(names) <= _AT_ONCE:
        return [names]
    return [names[at : at + _AT_ONCE] for at in range(0, len(names), _AT_ONCE)]


def _bits(members: Iterable[int]) -> bytes:
    bits = bytearray(MAX_MEMBER // 8 + 1)
    for member in known(members):
        bits[member >> 3] |= 1 << (member & 7)
    return bytes(bits)
