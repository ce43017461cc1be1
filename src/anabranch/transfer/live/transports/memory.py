"""Registered memory of this process: views by name, with the addresses that libraries ask for, and who uses them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from anabranch.core.errors import InvalidInput, Unavailable
from anabranch.transfer.regions import RemoteRegion, check_local, check_memory
from anabranch.transfer.transport import Move

RELEASE_S = 10.0


class Pinned:
    """One region. While it is registered its owner cannot resize or unmap the memory."""

    def __init__(self, view: memoryview, path: str, inode: int) -> None:
        self.view = view
        self.path = path
        self.inode = inode
        self.users = 0
        self._export = (ctypes.c_char * view.nbytes).from_buffer(view) if view.nbytes else None

    @property
    def address(self) -> int:
        return ctypes.addressof(self._export) if self._export is not None else 0

    def drop(self) -> None:
        self._export = None
        self.view.release()


class Held:
    """This side's memory of some moves, for as long as they last. A context manager."""

    def __init__(self, regions: dict[str, Pinned], done: Callable[[Iterable[Pinned]], None]) -> None:
        self._regions = regions
        self._done = done
        self._released = False

    def cut(self, move: Move) -> memoryview:
        return self._regions[move.local].view[move.local_offset : move.local_offset + move.size]

    def address(self, move: Move) -> int:
        return self._regions[move.local].address + move.local_offset

    def release(self) -> None:
        """Once; no view of it may be left."""
        if not self._released:
            self._released = True
            self._done(self._regions.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.release()


class LocalRegions:
    """Thread-safe table of one transport's regions."""

    def __init__(self) -> None:
        self._idle = threading.Condition()
        self._regions: dict[str, Pinned] = {}

    def add(self, region: str, memory: memoryview, path: str = "", inode: int = 0) -> Pinned:
        """Raises InvalidInput."""
        with self._idle:
            pinned = Pinned(check_memory(region, memory, self._regions), path, inode)
            self._regions[region] = pinned
            return pinned

    def remove(self, region: str) -> Pinned:
        """Nobody can use it any more, nobody does; the caller drops it. Raises InvalidInput, Unavailable."""
        with self._idle:
            pinned = self._regions.pop(region, None)
            if pinned is None:
                raise InvalidInput(f"no region '{region}' is registered here")
            self._wait(pinned)
        return pinned

    def hold(self, moves: Sequence[Move]) -> Held:
        """The moves' regions stay where they are until it is released. Raises InvalidInput for a move outside of
        them."""
        with self._idle:
            check_local(moves, {name: pinned.view.nbytes for name, pinned in self._regions.items()})
            held = {name: self._regions[name] for name in {move.local for move in moves}}
            for pinned in held.values():
                pinned.users += 1
        return Held(held, self._done)

    @contextmanager
    def serve(self, region: str) -> Iterator[memoryview | None]:
        """For a peer that names a region: its bytes, or None."""
        with self._idle:
            pinned = self._regions.get(region)
            if pinned is not None:
                pinned.users += 1
        try:
            yield pinned.view if pinned is not None else None
        finally:
            self._done([pinned] if pinned is not None else [])

    def described(self) -> dict[str, RemoteRegion]:
        with self._idle:
            return {
                name: RemoteRegion(pinned.view.nbytes, pinned.address, pinned.path, pinned.inode)
                for name, pinned in self._regions.items()
            }

    def clear(self) -> None:
        """Remove and drop all. Raises Unavailable."""
        with self._idle:
            regions, self._regions = list(self._regions.values()), {}
            for pinned in regions:
                self._wait(pinned)
        for pinned in regions:
            pinned.drop()

    def _done(self, used: Iterable[Pinned]) -> None:
        with self._idle:
            for pinned in used:
                pinned.users -= 1
            self._idle.notify_all()

    def _wait(self, pinned: Pinned) -> None:
        if not self._idle.wait_for(lambda: pinned.users == 0, RELEASE_S):
            raise Unavailable(f"a transfer still uses the memory after {RELEASE_S:.0f} s")
