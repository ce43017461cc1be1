"""Transport between processes of one host: the peer's memory is a file, mapped here; a move is a memcpy."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
from collections.abc import Sequence

from anabranch.core.errors import InvalidInput, Unavailable
from anabranch.transfer.live.transports.memory import Held, LocalRegions
from anabranch.transfer.regions import Description, RemoteRegion, describe, read_description, refused
from anabranch.transfer.transport import Capabilities, Move, Moved

KIND = "shm"


class Finished:
    """A transfer that was done when it was asked for."""

    def __init__(self, results: list[Moved]) -> None:
        self._results = results

    def wait(self, timeout_s: float) -> list[Moved]:
        return list(self._results)


class _Peer:
    def __init__(self, description: Description) -> None:
        self.regions = description.regions
        self.maps: dict[str, mmap.mmap] = {}
        for name, region in description.regions.items():
            if region.size:
                self.maps[name] = _map(name, region)

    def close(self) -> None:
        for mapped in self.maps.values():
            with contextlib.suppress(BufferError):  # a copy is just running: unmapped when it ends
                mapped.close()
        self.maps = {}


class ShmTransport:
    """See `transfer.transport`. The peer's files must be readable and writable for this user."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(remote=False, mapped_only=True)
        self._name = f"{KIND}-{secrets.token_hex(8)}"
        self._local = LocalRegions()
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def register(self, region: str, memory: memoryview, path: str = "") -> None:
        if not path:
            raise InvalidInput(f"region '{region}' needs the path of the file that its memory maps")
        try:
            stat = os.stat(path)
        except OSError as error:
            raise InvalidInput(f"region '{region}': cannot use {path}: {error.strerror}") from error
        if stat.st_size < memory.nbytes:
            raise InvalidInput(f"region '{region}': {path} has {stat.st_size} bytes, the memory {memory.nbytes}")
        self._local.add(region, memory, path, stat.st_ino)

    def release(self, region: str) -> None:
        self._local.remove(region).drop()

    def describe(self) -> bytes:
        return describe(Description(kind=KIND, name=self._name, regions=self._local.described()))

    def connect(self, description: bytes) -> str:
        read = read_description(description, KIND)
        peer = _Peer(read)
        with self._lock:
            former, self._peers[read.name] = self._peers.get(read.name), peer
        if former is not None:
            former.close()
        return read.name

    def read(self, peer: str, moves: Sequence[Move]) -> Finished:
        return self._move(peer, moves, write=False)

    def write(self, peer: str, moves: Sequence[Move]) -> Finished:
        return self._move(peer, moves, write=True)

    def close(self) -> None:
        with self._lock:
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.close()
        self._local.clear()

    def _move(self, name: str, moves: Sequence[Move], *, write: bool) -> Finished:
        peer = self._peers.get(name)
        if peer is None:
            raise InvalidInput(f"no peer '{name}'; connect first")
        with self._local.hold(moves) as held:
            verdicts = refused(moves, peer.regions)
            return Finished(
                [
                    self._copy(peer, move, held, write) if verdict is None else verdict
                    for move, verdict in zip(moves, verdicts, strict=True)
                ]
            )

    def _copy(self, peer: _Peer, move: Move, held: Held, write: bool) -> Moved:
        if not move.size:
            return Moved.OK
        mapped = peer.maps.get(move.region)
        if mapped is None or not _still_there(peer.regions[move.region]):
            return Moved.LOST
        with memoryview(mapped) as whole:
            there, here = whole[move.offset : move.offset + move.size], held.cut(move)
            if write:
                there[:] = here
            else:
                here[:] = there
            there.release()
            here.release()
        return Moved.OK


def _map(name: str, region: RemoteRegion) -> mmap.mmap:
    try:
        fd = os.open(region.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable(f"cannot map the peer's region '{name}' ({region.path}): {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        if stat.st_ino != region.inode or stat.st_size < region.size:
            raise Unavailable(f"{region.path} is not the peer's file any more; ask it for a new description")
        return mmap.mmap(fd, region.size)
    finally:
        os.close(fd)


def _still_there(region: RemoteRegion) -> bool:
    try:
        return os.stat(region.path).st_ino == region.inode
    except OSError:
        return False
