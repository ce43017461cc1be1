"""The small file that keeps removed values from coming back after a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

from anabranch.store.values.log import Removals
from anabranch.store.values.log_format import REMOVAL_BYTES, Removal, pack_removal, unpack_removals

REWRITE_BYTES = 1 << 20


class RemovalLog:
    """Append-only until it is rewritten with what still matters. `known`: everything that was removed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._limit = REWRITE_BYTES
        self.known = Removals(self._load())

    def append(self, removals: Sequence[Removal], *, durable: bool = True) -> None:
        """On return they survive a kill, `durable` ones a crash of the machine. Raises OSError."""
        data = b"".join(pack_removal(removal) for removal in removals)
        with self._lock:
            for removal in removals:
                self.known.add(removal)
            size = os.fstat(self._fd).st_size
            try:
                if os.write(self._fd, data) != len(data):
                    raise OSError("only a part of the removals could be written")
            except OSError:
                os.ftruncate(self._fd, size)
                raise
            if durable:
                os.fdatasync(self._fd)

    @property
    def wants_rewrite(self) -> bool:
        return os.fstat(self._fd).st_size > self._limit

    def rewrite(self, dead: Callable[[], dict[bytes, bytes]]) -> None:
        """Keep only what concerns entries that are still on disk (`dead`: their names and scopes; asked when no removal
        is between leaving the index and arriving here). No value may be on its way to the disk. Raises OSError."""
        with self._lock:
            needed = self.known.still_needed(dead())
            data = b"".join(pack_removal(removal) for removal in needed)
            temporary = self._path + ".tmp"
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.write(fd, data) != len(data):
                    raise OSError("only a part of the removals could be written")
                os.fdatasync(fd)
                os.rename(temporary, self._path)
            except OSError:
                os.close(fd)
                os.unlink(temporary)
                raise
            os.close(self._fd)
            self._fd = fd
            self.known = Removals(needed)
            self._limit = max(REWRITE_BYTES, 2 * len(data))

    def close(self) -> None:
        os.close(self._fd)

    def _load(self) -> list[Removal]:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(self._path, "rb") as file:
            data = file.read()
        found = list(unpack_removals(data))
        os.ftruncate(self._fd, len(found) * REMOVAL_BYTES)  # what a kill tore would hide what follows
        return found
