"""The shared index of a node's arena: what a client on its host finds without a call.

**Covers** the writer (the node) and readers. **Does not cover** what else a warm restart needs of a value (sums,
parent). **See also** `index_file` for the file, `shared_index.h` for the protocol between writer and readers,
`index_in_python` for the twin.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from typing import Self

from anabranch.core.errors import InvalidInput, Unavailable
from anabranch.store.values.contracts import Place
from anabranch.store.values.live import index_file
from anabranch.store.values.live.index_file import LIVE, IndexFile
from anabranch.store.values.live.index_in_python import PythonIndex, suits
from anabranch.store.values.live.index_native import NativeIndex
from anabranch.store.values.live.names import joined, joined_by_size, names_in_python
from anabranch.store.values.live.native import library
from anabranch.store.values.scope import NAME_BYTES, SCOPE_BYTES, Key

_FOUND = struct.Struct("@QQII")
_ENTRY = struct.Struct("@32s16sQQII")
_AT_ONCE = 4096


class SharedIndexReader:
    """`contracts.SharedIndex` without `put` and `discard`. Thread-safe. After `close`, and in an index that a new one
    has replaced, nothing is found. Raises InvalidInput for names, scopes and name keys of a wrong size."""

    def __init__(self, file: IndexFile, *, writable: bool = False) -> None:
        native = library()
        if native is None and not suits():
            raise Unavailable("the shared index needs a C compiler on this processor; values are had through the node")
        self._table = PythonIndex(file, writable) if native is None else NativeIndex(native, file, writable)
        self._inode = os.fstat(file.fd).st_ino
        self._capacity = file.capacity
        self._closed = False
        # Not in `close`, nor at the end of the process: another thread may be about to call.
        weakref.finalize(self, self._table.unmap).atexit = False

    @classmethod
    def attach(cls, path: str) -> Self:
        """Raises Unavailable if there is no index that can be used; ask the node instead."""
        file = index_file.attach(path)
        try:
            return cls(file)
        finally:
            os.close(file.fd)

    @property
    def inode(self) -> int:
        """Of the file that is mapped, to compare with `Welcome.index_inode`."""
        return self._inode

    @property
    def alive(self) -> bool:
        """False: nothing will be found here any more."""
        return not self._closed and self._table.state() == LIVE

    @property
    def capacity(self) -> int:
        return self._capacity

    def __len__(self) -> int:
        return self._table.count()

    def find(self, name: bytes, scope: bytes) -> Place | None:
        return self.find_many(name, scope)[0]

    def find_many(self, names: bytes, scope: bytes) -> list[Place | None]:
        self._check(names, scope)
        if self._closed:
            return [None] * (len(names) // NAME_BYTES)
        rows = _FOUND.iter_unpack(self._table.find(bytes(names), scope))
        return [Place(offset, size, generation) if found else None for offset, size, generation, found in rows]

    def present(self, names: bytes, scope: bytes) -> bytes:
        self._check(names, scope)
        return bytes(len(names) // NAME_BYTES) if self._closed else self._table.present(bytes(names), scope)

    def present_keys(self, keys: Sequence[Key], name_key: bytes, scope: bytes) -> bytes:
        """`present` of the names of `keys` (`names.names_of`, with its errors) in one call. As a list of bool:
        `memoryview(answer).cast("?").tolist()`."""
        if len(name_key) != NAME_BYTES:
            raise InvalidInput(f"a name key has {NAME_BYTES} bytes, this one has {len(name_key)}")
        self._check(b"", scope)
        count = len(keys)
        if count > _AT_ONCE:
            parts = (keys[at : at + _AT_ONCE] for at in range(0, count, _AT_ONCE))
            return b"".join(self.present_keys(part, name_key, scope) for part in parts)
        if count and not self._closed and isinstance(self._table, NativeIndex):
            for join in (joined, joined_by_size):
                answer = self._table.present_keys(join(keys), count, name_key, scope)
                if answer is not None:
                    return answer
        return self.present(names_in_python(keys, name_key), scope)

    def still(self, name: bytes, place: Place) -> bool:
        """True only if the bytes of `place` that were read before this call, since it was found, were the value's."""
        if len(name) != NAME_BYTES:
            raise InvalidInput(f"a name has {NAME_BYTES} bytes, this one has {len(name)}")
        return not self._closed and self._table.still(name, place.offset, place.size, place.generation)

    def close(self) -> None:
        self._closed = True

    def _check(self, names: bytes, scope: bytes) -> None:
        if len(names) % NAME_BYTES or len(scope) != SCOPE_BYTES:
            sizes = f"{len(names)} and {len(scope)}"
            raise InvalidInput(f"names have {NAME_BYTES} bytes each and a scope {SCOPE_BYTES}, not {sizes}")


class SharedIndexWriter(SharedIndexReader):
    """`contracts.SharedIndex`, for the one process that writes it; it holds a lock on the file until `close` or its
    death. Thread-safe. An entry's generation must differ from every earlier one that the same name had at the same
    offset and size (also before a restart): it is all that tells a reader that bytes were replaced."""

    def __init__(self, file: IndexFile) -> None:
        try:
            super().__init__(file, writable=True)
        except BaseException:
            index_file.unlock(file)
            raise
        self._unlock = weakref.finalize(self, index_file.unlock, file)

    @classmethod
    def create(cls, path: str, capacity: int) -> Self:
        """A new, empty one for `capacity` entries (108 bytes each, taken at once), mode 0600; readers of one that was
        there find nothing from now on. Raises Unavailable if another process writes it, ConfigError if there is no
        room."""
        return cls(index_file.create(path, capacity))

    @classmethod
    def reopen(cls, path: str) -> Self | None:
        """The one that a dead process left, with all its entries but one that it was just writing; its readers go on.
        None: there is none, or none that can be used. Raises Unavailable if another process writes it."""
        file = index_file.reopen(path)
        if file is None:
            return None
        writer = cls(file)
        writer._table.rebuild()
        return writer

    def put(self, name: bytes, scope: bytes, place: Place) -> bool:
        self._check(name, scope)
        if len(name) != NAME_BYTES or not 0 <= place.generation < 1 << 32:
            raise InvalidInput(f"one name of {NAME_BYTES} bytes and a generation below 2**32 are put, not {place}")
        return not self._closed and self._table.put(name, scope, place.offset, place.size, place.generation)

    def discard(self, name: bytes) -> None:
        """When it returns, no reader's `still` vouches for the name: its bytes may be overwritten."""
        if len(name) != NAME_BYTES:
            raise InvalidInput(f"a name has {NAME_BYTES} bytes, this one has {len(name)}")
        if not self._closed:
            self._table.discard(name)

    def entries(self) -> Iterator[tuple[bytes, bytes, Place]]:
        """(name, scope, place) of every entry; put and discard nothing meanwhile."""
        at, end = 0, False
        while not end and not self._closed:
            rows, at = self._table.entries(at, _AT_ONCE)
            end = len(rows) < _AT_ONCE * _ENTRY.size
            for name, scope, offset, size, generation, _ in _ENTRY.iter_unpack(rows):
                yield name, scope, Place(offset, size, generation)

    def retire(self) -> None:
        """Readers find nothing here any more, ever: the arena goes away."""
        if not self._closed:
            self._table.retire()

    def close(self) -> None:
        """Gives the lock up; the file stays, and readers go on finding what it has."""
        super().close()
        self._unlock()
