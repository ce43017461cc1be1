"""A node's DRAM tier: one file in shared memory that the node and its engines map.

    page 0      header: magic, version, epoch, layout digest, slots, slot bytes, attached sessions
    table       one 96-byte record per slot
    data        [slots][Full Block], page-aligned

**Ownership** The node is the only writer of header and table. An engine writes only the data of slots that it holds
uncommitted. The table is what a new node process knows about the slots after the old one was killed: the state byte
is written last, so a record is either the old one or complete.
**Does not cover** who may use a slot (`store.slots`).
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct

from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import ConfigError, LayoutMismatch, Unavailable
from anabranch.transfer.layouts import layout_digest
from anabranch.transfer.records import FREE, AttachedSession, SlotRecord

MAGIC = b"ANBRARNA"
VERSION = 1
PAGE = 4096
HEADER = struct.Struct("<8sIIQ16sQQ")  # magic, version, sessions, epoch, layout digest, slots, slot bytes
RECORD = struct.Struct("=B3xIQQ8s32s32s")  # state, generation, owner, block sum, tenant, key, parent
SESSION = struct.Struct("<QQ16s")  # pid, process start (clock ticks), session
SESSION_AT = 256
MAX_SESSIONS = (PAGE - SESSION_AT) // SESSION.size


def arena_slots(layout: KvLayout, dram_bytes: int) -> int:
    """How many slots an arena of at most `dram_bytes` has. Raises ConfigError if not even one fits."""
    slots = (dram_bytes - 2 * PAGE) // (layout.full_block_bytes + RECORD.size)
    if slots < 1:
        raise ConfigError(f"dram_bytes = {dram_bytes} holds no block of {layout.full_block_bytes} bytes; raise it")
    return slots


def _data_at(slots: int) -> int:
    return PAGE + -(-slots * RECORD.size // PAGE) * PAGE


class Arena:
    """A mapped arena file. `data` is writable `[slots][Full Block]`."""

    def __init__(self, path: str, fd: int, layout: KvLayout, slots: int) -> None:
        self.path = path
        self.layout = layout
        self.slots = slots
        self._lock: int | None = None
        stat = os.fstat(fd)
        self.inode = stat.st_ino
        self._map = mmap.mmap(fd, stat.st_size)
        self._view = memoryview(self._map)
        start = _data_at(slots)
        self.data = self._view[start : start + slots * layout.full_block_bytes]
        self._table = self._view[PAGE:start]

    @classmethod
    def create(cls, path: str, layout: KvLayout, dram_bytes: int) -> tuple[Arena, bool]:
        """The node's arena at `path`, and whether it was there already with this layout and size (then its table
        holds what a former node left). Anything else at `path` is replaced.
        Raises ConfigError if the file system cannot hold it or another node uses it."""
        slots = arena_slots(layout, dram_bytes)
        size = _data_at(slots) + slots * layout.full_block_bytes
        lock = _own(path)
        kept = _is_arena(lock, layout, slots, size)
        if not kept and os.fstat(lock).st_size:
            # Never in place: an engine may still have the old file mapped.
            os.unlink(path)
            os.close(lock)
            lock = _own(path)
        try:
            room = os.statvfs(path)
            available = room.f_bavail * room.f_frsize + os.fstat(lock).st_blocks * 512
            if available < size:
                raise ConfigError(f"dram_bytes needs {size} bytes at {path} but {available} are free; lower dram_bytes")
            if not kept:
                os.ftruncate(lock, size)
            arena = cls(path, lock, layout, slots)
        except ConfigError:
            os.close(lock)
            raise
        arena._lock = lock
        if not kept:
            arena._write_header(epoch=0)
        arena._bump_epoch()
        return arena, kept

    @classmethod
    def attach(cls, path: str, layout: KvLayout, slots: int) -> Arena:
        """An engine's view. Raises Unavailable if there is no arena, LayoutMismatch if it is another one."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"cannot map the arena {path}: {error}; is its node running?") from error
        try:
            if not _matches(os.pread(fd, HEADER.size, 0), layout, slots):
                raise LayoutMismatch(f"the arena {path} has another layout, size or version than this engine")
            return cls(path, fd, layout, slots)
        finally:
            os.close(fd)

    def block(self, slot: int) -> memoryview:
        size = self.layout.full_block_bytes
        return self.data[slot * size : (slot + 1) * size]

    def layer(self, slot: int, layer: int) -> memoryview:
        start = slot * self.layout.full_block_bytes + layer * self.layout.layer_block_bytes
        return self.data[start : start + self.layout.layer_block_bytes]

    # --- table: the node writes, anyone reads ---------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Grows with every node process that opened the arena."""
        return int(HEADER.unpack_from(self._view)[3])

    def record(self, slot: int) -> SlotRecord:
        return SlotRecord(*RECORD.unpack_from(self._table, slot * RECORD.size))

    def generation(self, slot: int) -> int:
        return int(RECORD.unpack_from(self._table, slot * RECORD.size)[1])

    def write(self, slot: int, record: SlotRecord) -> None:
        at = slot * RECORD.size
        r = record
        # A kill between these lines leaves a free slot: its block is lost, never wrong.
        self._table[at] = FREE
        RECORD.pack_into(self._table, at, FREE, r.generation, r.owner, r.block_sum, r.tenant, r.key, r.parent)
        self._table[at] = r.state

    def seal(self, slot: int, block_sum: int) -> None:
        """Add a committed block's checksum to its record."""
        struct.pack_into("=Q", self._table, slot * RECORD.size + 16, block_sum)

    @property
    def sessions(self) -> list[AttachedSession]:
        count = min(HEADER.unpack_from(self._view)[2], MAX_SESSIONS)
        return [AttachedSession(*SESSION.unpack_from(self._view, SESSION_AT + i * SESSION.size)) for i in range(count)]

    def write_sessions(self, sessions: list[AttachedSession]) -> None:
        for i, s in enumerate(sessions[:MAX_SESSIONS]):
            SESSION.pack_into(self._view, SESSION_AT + i * SESSION.size, s.pid, s.started, s.session)
        struct.pack_into("<I", self._view, 12, min(len(sessions), MAX_SESSIONS))

    def close(self) -> None:
        """Unmap. A view of `data` that someone still holds keeps the memory mapped until it goes."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        with contextlib.suppress(BufferError):
            self._table.release()
            self.data.release()
            self._view.release()
            self._map.close()

    def _write_header(self, *, epoch: int) -> None:
        digest = layout_digest(self.layout)
        HEADER.pack_into(self._view, 0, MAGIC, VERSION, 0, epoch, digest, self.slots, self.layout.full_block_bytes)

    def _bump_epoch(self) -> None:
        struct.pack_into("<Q", self._view, 16, self.epoch + 1)


def _own(path: str) -> int:
    """The file, locked for as long as it is open. Raises ConfigError if another node has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise ConfigError(f"the arena {path} belongs to a running node; stop it or choose another path") from error
    return fd


def _is_arena(fd: int, layout: KvLayout, slots: int, size: int) -> bool:
    return os.fstat(fd).st_size == size and _matches(os.pread(fd, HEADER.size, 0), layout, slots)


def _matches(head: bytes, layout: KvLayout, slots: int) -> bool:
    if len(head) < HEADER.size:
        return False
    magic, version, _, _, digest, count, size = HEADER.unpack(head)
    wanted = (MAGIC, VERSION, layout_digest(layout), slots, layout.full_block_bytes)
    return (magic, version, digest, count, size) == wanted
