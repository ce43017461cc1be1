"""The shared memory of a value node: one file of bytes, which the node writes and clients on this host map.

**Covers** making it, finding a former one again, and refusing what cannot be. **Does not cover** what lies where
(`store.values.shelf`), nor the names (`index`, `node_records`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
from itertools import zip_longest

from anabranch.core.errors import ConfigError

RESERVE = 64 << 20
"""Bytes that must stay free in shared memory beyond what the arena takes: other files share it."""
TOUCH_STEP = 4 << 20
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
log = logging.getLogger(__name__)


class NodeMemory:
    """`data`: the arena, writable. `kept`: a former process of this node left it, with what it held. Mode 0600, locked
    for as long as the process lives; the file outlives it. Raises ConfigError if it cannot be had."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self.fd = _own(path)
        self._stop = threading.Event()
        self._toucher: threading.Thread | None = None
        self.kept = False
        try:
            found = os.fstat(self.fd)
            self.kept = found.st_size == size
            if found.st_size and not self.kept:
                # Never in place: a client may still have the old file mapped.
                os.unlink(path)
                os.close(self.fd)
                self.fd = _own(path)
                found = os.fstat(self.fd)
            _check_room(path, size, found.st_blocks * 512)
            os.ftruncate(self.fd, size)
            self.inode = found.st_ino
            self._map = mmap.mmap(self.fd, size)
        except BaseException:
            if not self.kept:
                os.unlink(path)
            os.close(self.fd)
            raise
        self.data = memoryview(self._map)

    def touch(self) -> None:
        """Have the pages made in the background, so that first writes find them. Stops early if memory is short."""
        self._toucher = threading.Thread(target=self._touch, name="arena-touch", daemon=True)
        self._toucher.start()

    def close(self, *, remove: bool = False) -> None:
        """Unmap. A view that somebody still holds keeps the memory mapped until it goes."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()
        if remove:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        with contextlib.suppress(BufferError):
            self.data.release()
            self._map.close()
        os.close(self.fd)

    def _touch(self) -> None:
        """From both ends: large values come to lie at the high one, small ones at the low one."""
        steps = range(0, self.size, TOUCH_STEP)
        half = len(steps) // 2
        for low, high in zip_longest(steps[:half], reversed(steps[half:])):
            for at in (high, low):
                if self._stop.is_set():
                    return
                if at is None:
                    continue
                try:
                    if _available_bytes() < 2 * RESERVE:
                        raise MemoryError("this host has little memory left")
                    self._populate(at, min(TOUCH_STEP, self.size - at))
                except (OSError, MemoryError) as error:
                    # An older kernel: pages come with their first write, as they would without this.
                    log.warning("arena %s: only a part of its pages could be made ahead: %s", self.path, error)
                    return

    def _populate(self, at: int, length: int) -> None:
        """Not `mmap.madvise`: it keeps all threads waiting meanwhile."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map, at))
        if _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _POPULATE_WRITE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _own(path: str) -> int:
    """The file, locked. Raises ConfigError if another node has it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot make the arena {path}: {error.strerror}; choose another path") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(f"the arena {path} belongs to a running node; stop it or choose another path") from error
    os.fchmod(fd, 0o600)
    return fd


def _check_room(path: str, size: int, has: int) -> None:
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize + has
    if size > free:
        folder = os.path.dirname(path) or "."
        raise ConfigError(f"store.dram_bytes = {size} does not fit {folder}, which has {free} bytes free; lower it")


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 1 << 62
