"""A node's memory, seen from a client on the same host: names are looked up and bytes copied without a call.

Read-only. A copy counts only if the index still says afterwards that the place was the value's all the time; any doubt
is a miss, and the node is asked. A lane to the node, on which nothing is ever said, shows that its process lives: what
a dead one left behind is nobody's to read, others may have removed or invalidated it since.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from functools import lru_cache

from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.core.live.buffers import address_of
from anabranch.store.values.contracts import Place
from anabranch.store.values.got import Got
from anabranch.store.values.live.index import SharedIndexReader
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.recency import Recency
from anabranch.store.values.live.session import Session, same_process
from anabranch.store.values.live.sinks import Sink
from anabranch.store.values.messages import Welcome
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import Parts
from anabranch.store.values.scope import NAME_BYTES, Key

UNLOCKED_BYTES = 64 << 10
"""A copy of at least so many bytes lets other threads run meanwhile."""
TETHER_S = 1.0
TIER = "dram"


class LocalMemory:
    """A mapped arena and its index. Whoever is copying keeps the mapping alive: closing never pulls it away."""

    def __init__(
        self,
        welcome: Welcome,
        index: SharedIndexReader,
        arena: mmap.mmap,
        scope: bytes,
        recency: Recency,
        tether: Lane,
    ) -> None:
        self._inodes = welcome.arena_inode, welcome.index_inode
        self._index = index
        self._tether = tether
        self._recency = recency
        self._scope = scope
        self._arena: memoryview | None = memoryview(arena)
        self._size = len(arena)
        self._base = address_of(arena)

    @classmethod
    def attach(cls, welcome: Welcome, session: Session, scope: bytes, recency: Recency) -> LocalMemory | None:
        """None: the node's memory cannot be seen from here (another mount namespace, another user, replaced)."""
        if not (session.same_host(welcome) and welcome.arena_path and welcome.index_path and welcome.local_address):
            return None
        with contextlib.ExitStack() as undo:
            try:
                tether, again = session.open(welcome.local_address, TETHER_S)
                undo.callback(tether.close)
                index = SharedIndexReader.attach(welcome.index_path)
                undo.callback(index.close)
                if not same_process(welcome, again) or index.inode != welcome.index_inode:
                    return None
                memory = cls(welcome, index, _map(welcome.arena_path, welcome.arena_inode), scope, recency, tether)
            except (AnabranchError, OSError, ValueError):
                return None  # the node is asked instead
            undo.pop_all()
            return memory

    @property
    def alive(self) -> bool:
        """The node's process lives, and its index and arena are those that are mapped here."""
        return self._arena is not None and self._index.alive and self._tether.connected

    def of(self, welcome: Welcome) -> bool:
        """It is that node's, and not replaced."""
        return self._inodes == (welcome.arena_inode, welcome.index_inode)

    def close(self) -> None:
        self._index.close()
        self._tether.close()
        self._arena = None  # unmapped with the last view of it

    def present_keys(self, keys: Sequence[Key], name_key: bytes) -> bytes:
        """One byte a key, 1 = there."""
        return self._index.present_keys(keys, name_key, self._scope)

    def get_one(self, name: bytes, sink: Sink) -> Got | None:
        """None: not here, or not any more."""
        place = self._index.find(name, self._scope)
        if place is None:
            return None
        self._recency.read([name])
        return self._copied(name, place, sink)

    def get_many(self, names: bytes, sinks: Sequence[Sink]) -> list[Got | None]:
        got: list[Got | None] = [None] * len(sinks)
        found = []
        for i, place in enumerate(self._index.find_many(names, self._scope)):
            if place is not None:
                name = names[i * NAME_BYTES : (i + 1) * NAME_BYTES]
                found.append(name)
                got[i] = self._copied(name, place, sinks[i])
        if found:
            self._recency.read(found)
        return got

    def view(self, offset: int, size: int) -> memoryview:
        """A read-only view of leased bytes, whose exporter (`view.obj`) is its own: as long as that one lives,
        something shows these bytes. Raises Unavailable if they lie outside of what is mapped."""
        arena = self._arena
        if arena is None or not 0 <= offset <= offset + size <= self._size:
            raise Unavailable("the node's memory is not what it was when it was mapped")
        exporter = _array_type(size).from_address(self._base + offset)
        exporter.arena = arena  # type: ignore[attr-defined]  # mapped as long as it is seen
        return memoryview(exporter).toreadonly().cast("B") if size else memoryview(exporter).toreadonly()

    def _copied(self, name: bytes, place: Place, sink: Sink) -> Got | None:
        arena, room = self._arena, sink.room
        if arena is None or place.offset + place.size > self._size:
            return None
        if room is not None and place.size > room:
            return Got(Outcome.TOO_BIG, place.size) if self._index.still(name, place) else None
        self._copy(arena, place, sink.open(place.size))
        return Got(Outcome.OK, place.size, TIER) if self._index.still(name, place) else None

    def _copy(self, arena: memoryview, place: Place, parts: Parts) -> None:
        at = place.offset
        for view in parts.cut(0, place.size):
            count = view.nbytes
            if count < UNLOCKED_BYTES:
                view[:] = arena[at : at + count]
            else:
                ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(view)), self._base + at, count)
            at += count


@lru_cache(maxsize=256)
def _array_type(size: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Making such a type costs more than making the view."""
    return ctypes.c_ubyte * size


def _map(path: str, inode: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(fd)
        if about.st_ino != inode or about.st_uid != os.geteuid():
            raise Unavailable(f"{path} is not the node's arena")
        return mmap.mmap(fd, about.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
