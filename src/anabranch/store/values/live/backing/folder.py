"""Objects as files: written beside, flushed, renamed. Needs no locks, on local or shared file systems."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Sequence

from anabranch.core.errors import ConfigError
from anabranch.store.values.live.backing.objects import Listed
from anabranch.store.values.packs import GONE, INDEX, PACKS, object_number

GAP_BYTES = 64 << 10
MAX_PARTS = 512
STALE_S = 86_400.0


class FolderObjects:
    """Raises ConfigError if the folder cannot be used. Folders 0700, files 0600."""

    def __init__(self, path: str) -> None:
        self._root = path
        try:
            for name in (PACKS, INDEX, GONE):
                os.makedirs(os.path.join(path, name), mode=0o700, exist_ok=True)
            self._clean()
        except OSError as error:
            raise ConfigError(f"backing folder {path} cannot be used: {error.strerror}; name another one") from error

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        path = os.path.join(self._root, name)
        if os.path.exists(path):
            raise FileExistsError(errno.EEXIST, "the object is there already", path)
        temporary = f"{path}.{os.urandom(8).hex()}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write(fd, parts)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(os.path.dirname(path))

    def get(self, name: str) -> bytes:
        with open(os.path.join(self._root, name), "rb") as file:
            return file.read()

    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        fd = os.open(os.path.join(self._root, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, buffers in _runs(pieces):
                _read(fd, offset, buffers)
        finally:
            os.close(fd)

    def list(self, prefix: str) -> list[Listed]:
        now = time.time()
        folder = os.path.join(self._root, prefix)
        found = []
        for name in os.listdir(folder):
            if object_number(prefix + name) is not None:
                with contextlib.suppress(FileNotFoundError):
                    found.append(Listed(prefix + name, now - os.stat(os.path.join(folder, name)).st_mtime))
        return found

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._root, name))

    def close(self) -> None:
        """Nothing is held."""

    def _clean(self) -> None:
        """Remove what writers left that were killed long ago."""
        for prefix in (PACKS, INDEX, GONE):
            folder = os.path.join(self._root, prefix)
            for name in os.listdir(folder):
                if name.endswith(".tmp"):
                    path = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - os.stat(path).st_mtime > STALE_S:
                            os.unlink(path)


def _write(fd: int, parts: Sequence[memoryview]) -> None:
    left = [part for part in parts if part.nbytes]
    while left:
        done = os.writev(fd, left[:MAX_PARTS])
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]


def _runs(pieces: Sequence[tuple[int, memoryview]]) -> list[tuple[int, list[memoryview]]]:
    """(offset, buffers that follow each other there); small gaps are read into scratch memory."""
    runs: list[tuple[int, list[memoryview]]] = []
    end = -1
    for offset, view in pieces:
        gap = offset - end
        if runs and 0 <= gap <= GAP_BYTES and len(runs[-1][1]) < MAX_PARTS:
            if gap:
                runs[-1][1].append(memoryview(bytearray(gap)))
            runs[-1][1].append(view)
        else:
            runs.append((offset, [view]))
        end = offset + view.nbytes
    return runs


def _read(fd: int, offset: int, buffers: list[memoryview]) -> None:
    """Where the file ends early the rest stays as it is: the sums show it."""
    left = [view for view in buffers if view.nbytes]
    while left:
        done = os.preadv(fd, left, offset)
        if done <= 0:
            return
        offset += done
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
