"""The file of a shared index: who may write it, and how it is laid out.

    header 4096 bytes   magic, slots, capacity, secret, factor, state, count: native uint64
    slots × 64 bytes    generation << 32 | version << 2 | TAKEN | BUSY, name 4 words, scope 2 words, offset
    slots × 8 bytes     size

A name's home is ((first word ^ secret) · factor mod 2⁶⁴ >> 32) · slots >> 32. The writer holds an exclusive lock on
the file; one that replaces a file retires it first, so that readers which still map it find nothing there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct

import msgspec

from anabranch.core.errors import ConfigError, Unavailable

MAGIC = int.from_bytes(b"abindex1", "little")
HEADER_BYTES = 4096
SLOT_BYTES = 64
BYTES_A_SLOT = SLOT_BYTES + 8
LIVE, RETIRED, REBUILDING = 1, 2, 3
_HEADER = struct.Struct("@7Q")
_STATE_AT = 40
_TRIES = 16


class IndexFile(msgspec.Struct, frozen=True):
    """An open file of a valid index. `fd` is the owner's to close; a writer's holds the lock."""

    fd: int
    slots: int
    capacity: int
    secret: int
    factor: int

    @property
    def length(self) -> int:
        return HEADER_BYTES + self.slots * BYTES_A_SLOT


def create(path: str, capacity: int) -> IndexFile:
    """A new, empty index for `capacity` entries, in the place of any that is there; all its memory is taken now.
    Raises Unavailable if another process writes the one that is there, ConfigError if there is no room."""
    if capacity < 1:
        raise ConfigError(f"an index has room for at least one entry, not {capacity}")
    # One name for all attempts: what a killed one left is taken over by the next.
    draft = f"{path}.new"
    fd = _locked(draft, create=True)
    if fd is None:
        raise Unavailable(f"{draft} is removed by another process")
    old = None
    try:
        _fill(fd, path, capacity)
        old = _locked(path)
        if old is not None and os.fstat(old).st_size >= HEADER_BYTES:
            os.pwrite(old, struct.pack("@Q", RETIRED), _STATE_AT)
        os.rename(draft, path)
        return _opened(fd)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    finally:
        if old is not None:
            os.close(old)


def reopen(path: str) -> IndexFile | None:
    """For writing, after the process that wrote it died. None: there is none, or none that can be used. Raises
    Unavailable if another process writes it."""
    fd = _locked(path)
    if fd is None:
        return None
    opened = _checked(fd)
    if opened is None:
        os.close(fd)
    return opened


def attach(path: str) -> IndexFile:
    """For reading. Raises Unavailable if it cannot be used; ask the node instead."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"cannot open the index {path}: {error.strerror}") from error
    opened = _checked(fd)
    if opened is None:
        os.close(fd)
        raise Unavailable(f"{path} is no index of this version that is in use")
    return opened


def unlock(file: IndexFile) -> None:
    """Give up the lock and the descriptor. Closing alone would not do: a map of the file keeps the lock."""
    fcntl.flock(file.fd, fcntl.LOCK_UN)
    os.close(file.fd)


def _fill(fd: int, path: str, capacity: int) -> None:
    slots = capacity + capacity // 2 + 2
    size = HEADER_BYTES + slots * BYTES_A_SLOT
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, size)
        secret, factor = struct.unpack("@2Q", os.urandom(16))
        os.pwrite(fd, _HEADER.pack(MAGIC, slots, capacity, secret, factor | 1, LIVE, 0), 0)
    except OSError as error:
        raise ConfigError(
            f"no room for an index of {size} bytes at {path}: {error.strerror}; lower dram_bytes"
        ) from error


def _locked(path: str, *, create: bool = False) -> int | None:
    """The file at `path`, open and locked; None if there is none."""
    for _ in range(_TRIES):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError as error:
            if create:
                raise ConfigError(f"cannot create the index {path}: its folder is missing") from error
            return None
        except OSError as error:
            raise ConfigError(f"cannot use {path} for the index: {error.strerror}; remove it") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise Unavailable(f"another process writes the index {path}; is this node running twice?") from error
        about = os.fstat(fd)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(about, os.stat(path, follow_symlinks=False)):
                return fd
        os.close(fd)  # replaced meanwhile
    raise Unavailable(f"{path} is being replaced by another process again and again")


def _checked(fd: int) -> IndexFile | None:
    about = os.fstat(fd)
    header = os.pread(fd, _HEADER.size, 0)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or len(header) < _HEADER.size:
        return None
    magic, slots, capacity, secret, factor, state, _ = _HEADER.unpack(header)
    whole = about.st_size == HEADER_BYTES + slots * BYTES_A_SLOT and capacity < slots < 1 << 32
    if magic != MAGIC or not whole or state == RETIRED:
        return None
    return IndexFile(fd, slots, capacity, secret, factor)


def _opened(fd: int) -> IndexFile:
    opened = _checked(fd)
    if opened is None:
        raise Unavailable("the index was changed by another process while it was created")
    return opened
