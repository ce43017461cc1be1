"""The files of an SSD tier: few, large, preallocated, owned by one process, never beyond the limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterator

from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import ConfigError
from anabranch.core.faults import Faults
from anabranch.store.ssd_format import BODY, CRC, segment_slots, stride_bytes, unpack_header
from anabranch.store.ssd_index import SsdEntry
from anabranch.transfer.layouts import layout_digest

NAME = re.compile(r"kv-([0-9a-f]{32})-(\d+)-(\d{5})\.seg")
LOCK = "lock"


class SegmentFiles:
    """Segment n holds slots n·per_segment … Files of another layout or geometry are deleted at once; what others put
    into the directory counts against the limit and is left alone.

    Raises ConfigError if another process uses the directory or not one block fits.
    """

    def __init__(self, directory: str, layout: KvLayout, limit_bytes: int, faults: Faults) -> None:
        self._directory = directory
        self._faults = faults
        self.stride = stride_bytes(layout)
        self._digest = layout_digest(layout)
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.per_segment = self._geometry(limit_bytes) or segment_slots(layout, limit_bytes)
        self._lock = os.open(os.path.join(directory, LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files: list[int] = []
        self.direct = False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.slots = self._adopt(limit_bytes)
        except BlockingIOError as error:
            os.close(self._lock)
            raise ConfigError(f"ssd_dir {directory} is in use by another node; give each node its own") from error
        except (ConfigError, OSError):
            self.close()
            raise

    @property
    def real_slots(self) -> int:
        """Slots that have space behind them."""
        return len(self._files) * self.per_segment

    def place(self, slot: int) -> tuple[int, int]:
        """(file descriptor, offset) of a slot with space behind it."""
        return self._files[slot // self.per_segment], slot % self.per_segment * self.stride

    def grow_to(self, slot: int) -> None:
        """Make sure that there is space behind the slot. Raises OSError (ENOSPC: the file system is full)."""
        while slot >= self.real_slots:
            if self._faults.at("ssd.grow"):
                raise OSError(errno.ENOSPC, "no space left on device")
            path = self._path(len(self._files))
            fd = self._open(path, os.O_CREAT)
            try:
                os.posix_fallocate(fd, 0, self.per_segment * self.stride)
            except OSError:
                os.close(fd)
                os.unlink(path)
                raise
            self._files.append(fd)

    def entries(self) -> Iterator[SsdEntry]:
        """Every readable header."""
        size = BODY.size + CRC.size
        for index in range(len(self._files)):
            with open(self._path(index), "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for at in range(self.per_segment):
                    head = os.pread(file.fileno(), size, at * self.stride)
                    entry = unpack_header(head, self._digest, index * self.per_segment + at)
                    if entry is not None:
                        yield entry

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        os.close(self._lock)

    def _geometry(self, limit_bytes: int) -> int:
        """Slots a segment in the files that are there already, 0 if there are none: another limit is no reason to
        throw them away, unless not even one of them fits."""
        names = (NAME.fullmatch(name) for name in sorted(os.listdir(self._directory)))
        slots = next((int(match[2]) for match in names if match and match[1] == self._digest.hex()), 0)
        return slots if slots * self.stride <= limit_bytes else 0

    def _adopt(self, limit_bytes: int) -> int:
        mine: dict[int, str] = {}
        foreign = 0
        for item in os.scandir(self._directory):
            match = NAME.fullmatch(item.name)
            if match is None:
                if item.name != LOCK:
                    foreign += item.stat(follow_symlinks=False).st_blocks * 512
            elif match[1] == self._digest.hex() and int(match[2]) == self.per_segment:
                mine[int(match[3])] = item.path
            else:
                os.unlink(item.path)
        segment_bytes = self.per_segment * self.stride
        segments = (limit_bytes - foreign) // segment_bytes if segment_bytes else 0
        if segments < 1:
            raise ConfigError(
                f"ssd_bytes = {limit_bytes} leaves no room for a block of {self.stride} bytes in {self._directory}"
                f" ({foreign} bytes are other files); raise ssd_bytes or set it to 0"
            )
        whole = next(n for n in range(len(mine) + 1) if n not in mine or n >= segments)
        for number, path in mine.items():
            if number >= whole or os.stat(path).st_size != segment_bytes:
                whole = min(whole, number)
        for number, path in mine.items():
            if number >= whole:
                os.unlink(path)
        self._files = [self._open(mine[number], 0) for number in range(whole)]
        return segments * self.per_segment

    def _path(self, index: int) -> str:
        return os.path.join(self._directory, f"kv-{self._digest.hex()}-{self.per_segment}-{index:05d}.seg")

    def _open(self, path: str, flags: int) -> int:
        flags |= os.O_RDWR | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
            self.direct = True
            return fd
        self.direct = False
        return os.open(path, flags, 0o600)
