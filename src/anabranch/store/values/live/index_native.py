"""A mapped index through the compiled calls of `shared_index.h`."""

from __future__ import annotations

import ctypes

from anabranch.core.errors import Unavailable
from anabranch.store.values.live.index_file import IndexFile
from anabranch.store.values.live.names import Joined
from anabranch.store.values.live.native import fresh_bytes
from anabranch.store.values.scope import NAME_BYTES

FOUND_BYTES = 24
ENTRY_BYTES = 72


class NativeIndex:
    """Each call is atomic among the threads of this process. Sizes of arguments are the caller's to check; after
    `unmap` no call may follow."""

    def __init__(self, native: ctypes.PyDLL, file: IndexFile, writable: bool) -> None:
        self._native = native
        self._index = native.index_open(file.fd, file.length, writable)
        if not self._index:
            raise Unavailable("the index cannot be mapped; is there memory left?")

    def present(self, names: bytes, scope: bytes) -> bytes:
        count = len(names) // NAME_BYTES
        answer: bytes = fresh_bytes(None, count)
        self._native.index_present(self._index, names, count, scope, answer)
        return answer

    def present_keys(self, keys: Joined, count: int, name_key: bytes, scope: bytes) -> bytes | None:
        """None: joined in a way that does not do for these keys (`names.joined`)."""
        data, separator, sizes = keys
        answer: bytes = fresh_bytes(None, count)
        problem = self._native.index_present_keys(
            self._index, data, len(data), separator, len(separator), sizes, count, name_key, scope, answer
        )
        return None if problem else answer

    def find(self, names: bytes, scope: bytes) -> bytes:
        """FOUND_BYTES for each name: offset u64, size u64, generation u32, 1 u32; 0 of each: not there."""
        count = len(names) // NAME_BYTES
        answer: bytes = fresh_bytes(None, count * FOUND_BYTES)
        self._native.index_find(self._index, names, count, scope, answer)
        return answer

    def still(self, name: bytes, offset: int, size: int, generation: int) -> bool:
        return bool(self._native.index_still(self._index, name, offset, size, generation))

    def put(self, name: bytes, scope: bytes, offset: int, size: int, generation: int) -> bool:
        return bool(self._native.index_put(self._index, name, scope, offset, size, generation))

    def discard(self, name: bytes) -> None:
        self._native.index_discard(self._index, name)

    def entries(self, at: int, limit: int) -> tuple[bytes, int]:
        """Up to `limit` entries of ENTRY_BYTES from slot `at` on (name, scope, then as `find`), and the next slot."""
        where = ctypes.c_uint64(at)
        answer: bytes = fresh_bytes(None, limit * ENTRY_BYTES)
        found = self._native.index_entries(self._index, ctypes.byref(where), limit, answer)
        return answer[: found * ENTRY_BYTES], where.value

    def rebuild(self) -> None:
        if not self._native.index_rebuild(self._index):
            raise Unavailable("no memory to mend the index")

    def retire(self) -> None:
        self._native.index_retire(self._index)

    def state(self) -> int:
        return int(self._native.index_state(self._index))

    def count(self) -> int:
        return int(self._native.index_count(self._index))

    def unmap(self) -> None:
        index, self._index = self._index, None
        if index:
            self._native.index_close(index)
