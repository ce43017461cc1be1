"""Group commit: appends that wait for the disk at the same time share one flush."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable

from anabranch.core.faults import Faults
from anabranch.store.values.live.log.files import LogFiles


class GroupSync:
    def __init__(self, files: LogFiles, faults: Faults) -> None:
        self._files = files
        self._faults = faults
        self._changed = threading.Condition()
        self._dirty: set[int] = set()
        self._wanted: set[int] = set()
        self._under_way: set[int] = set()
        self._names_dirty = False
        self.syncs = 0

    def wrote(self, segment: int) -> None:
        """Bytes of it are not on the disk yet."""
        with self._changed:
            self._dirty.add(segment)

    def named(self) -> None:
        """A file was created or renamed."""
        with self._changed:
            self._names_dirty = True

    def gone(self, segment: int) -> None:
        with self._changed:
            self._dirty.discard(segment)

    def wait(self, segments: Iterable[int]) -> None:
        """Return once everything written to them before this call survives a crash. Raises OSError."""
        mine = set(segments)
        while True:
            with self._changed:
                self._wanted |= mine & self._dirty
                self._changed.wait_for(lambda: not self._under_way)
                if not mine & self._dirty:
                    return
                batch = self._wanted & self._dirty
                self._dirty -= batch
                self._wanted -= batch
                self._under_way = batch
                names, self._names_dirty = self._names_dirty, False
            done = False
            try:
                self._sync(batch, names)
                done = True
            finally:
                with self._changed:
                    self._under_way = set()
                    if not done:
                        self._dirty |= batch
                        self._names_dirty |= names
                    self._changed.notify_all()

    def _sync(self, segments: Iterable[int], names: bool) -> None:
        if self._faults.at("log.sync"):
            raise OSError(errno.EIO, "input/output error")
        for segment in segments:
            try:
                with self._files.use(segment) as fd:
                    os.fdatasync(fd)
            except FileNotFoundError:
                continue  # evicted meanwhile
        if names:
            self._files.sync_folder()
        self.syncs += 1
