"""The files of a value log: few, large, preallocated, owned by one process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from anabranch.core.errors import ConfigError
from anabranch.core.faults import Faults
from anabranch.store.values.log_format import LOCK_NAME, PAGE, REMOVED_NAME, SEGMENT_NAME, VERSION, segment_name

MAX_OPEN = 128


class Found(msgspec.Struct, frozen=True):
    """What a folder held at the start. `ignored`: segments of other format versions, left alone."""

    segments: dict[int, int]
    ignored: int


class LogFiles:
    """Raises ConfigError if another process has the folder, or it cannot be used."""

    def __init__(self, folder: str, faults: Faults) -> None:
        self._folder = folder
        self._faults = faults
        self._lock = threading.Lock()
        self._open: OrderedDict[int, list[int]] = OrderedDict()  # segment → [descriptor, users]
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            self._owner = os.open(os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"ssd_dir {folder} cannot be used: {error.strerror}; name another folder") from error
        try:
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.chmod(folder, 0o700)
            self.direct = self._takes_direct()
        except BlockingIOError as error:
            os.close(self._owner)
            raise ConfigError(f"ssd_dir {folder} is in use by another node; give each node its own") from error
        except OSError as error:
            os.close(self._owner)
            raise ConfigError(f"ssd_dir {folder} cannot be used: {error.strerror}; name another folder") from error

    @property
    def removed_path(self) -> str:
        return os.path.join(self._folder, REMOVED_NAME)

    def scan(self) -> Found:
        """Our segments: number → size."""
        segments: dict[int, int] = {}
        ignored = 0
        for name in os.listdir(self._folder):
            match = SEGMENT_NAME.fullmatch(name)
            if match and int(match[1]) == VERSION:
                segments[int(match[2], 16)] = os.lstat(os.path.join(self._folder, name)).st_size
            elif match:
                ignored += 1
        return Found(segments, ignored)

    def other_bytes(self) -> int:
        """Everything in the folder that is not a segment of ours."""
        total = 0
        for root, _, names in os.walk(self._folder):
            for name in names:
                match = SEGMENT_NAME.fullmatch(name)
                if root == self._folder and match and int(match[1]) == VERSION:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    total += os.lstat(os.path.join(root, name)).st_blocks * 512
        return total

    def disk_bytes(self) -> int:
        """All bytes of the file system, used or not; 0 if it does not say."""
        stat = os.statvfs(self._folder)
        return stat.f_blocks * stat.f_frsize

    def create(self, number: int, size_bytes: int) -> None:
        """Raises OSError (ENOSPC: the file system is full); then no file is left behind."""
        if self._faults.at("log.grow"):
            raise OSError(errno.ENOSPC, "no space left on device")
        path = self.path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def recycle(self, old: int, new: int) -> None:
        """Segment `old` is from now on the empty segment `new`: frames of its former life do not count under another
        number, and its space needs not be found, zeroed and journalled again."""
        self._forget(old)
        os.rename(self.path(old), self.path(new))

    def delete(self, number: int) -> None:
        self._forget(number)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(number))

    @contextlib.contextmanager
    def use(self, number: int) -> Iterator[int]:
        """A descriptor for aligned reads and writes, which stays open meanwhile."""
        with self._lock:
            held = self._open.get(number)
            if held is None:
                held = self._open[number] = [self._descriptor(number), 0]
                self._trim()
            self._open.move_to_end(number)
            held[1] += 1
        try:
            yield held[0]
        finally:
            with self._lock:
                held[1] -= 1
                if self._open.get(number) is not held and not held[1]:
                    os.close(held[0])

    def index_descriptor(self, number: int) -> int:
        """For writes through the page cache: a frame is some hundred bytes, safe from a kill at once and from a crash
        after the next sync. The caller closes it."""
        return os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC)

    def sync_folder(self) -> None:
        """Names of files survive a crash of the machine."""
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        with self._lock:
            for held in self._open.values():
                if not held[1]:
                    os.close(held[0])
            self._open.clear()
        os.close(self._owner)

    def path(self, number: int) -> str:
        return os.path.join(self._folder, segment_name(number))

    def _descriptor(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        return os.open(self.path(number), flags | os.O_DIRECT if self.direct else flags)

    def _forget(self, number: int) -> None:
        with self._lock:
            held = self._open.pop(number, None)
            if held is not None and not held[1]:
                os.close(held[0])

    def _trim(self) -> None:
        for number, held in list(self._open.items()):
            if len(self._open) <= MAX_OPEN:
                break
            if not held[1]:
                del self._open[number]
                os.close(held[0])

    def _takes_direct(self) -> bool:
        """Some file systems refuse O_DIRECT when a file is opened, some at the first write. No space is no refusal."""
        path = os.path.join(self._folder, "probe.tmp")
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
            os.pwrite(fd, mmap.mmap(-1, PAGE), 0)
        except OSError as error:
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        finally:
            if fd >= 0:
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return True
