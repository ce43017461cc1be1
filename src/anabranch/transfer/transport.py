"""Moving bytes between registered memory of two processes: one contract, whatever the wires are.

    here.register("pages", memory)                there.register("arena", memory)
    peer = here.connect(description)      ←       there.describe()            opaque bytes, carried by the caller
    here.read(peer, [Move("arena", 4096, "pages", 0, 512 << 10)]).wait(5.0)   → [Moved.OK]

Ask a transport what it can do (`capabilities`), never which one it is. Implementations (`live/transports`) pass one
suite: shm (a mapping of the peer's file), tcp (slices over several NICs), nixl and mooncake (RDMA and more).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import msgspec


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """`remote`: peers on other hosts. `mapped_only`: memory must be a mapping of a file, given by its path.
    `withdraws`: nothing of a transfer is written here any more once `wait` returned; otherwise memory of a LATE or LOST
    move may change until `close`. `checked`: a flipped bit on the way is noticed (DAMAGED)."""

    remote: bool = True
    mapped_only: bool = False
    withdraws: bool = True
    checked: bool = False


class Move(msgspec.Struct, frozen=True):
    """`size` bytes between `offset` of the peer's `region` and `local_offset` of this side's `local`."""

    region: str
    offset: int
    local: str
    local_offset: int
    size: int


class Moved(IntEnum):
    """What became of one move."""

    OK = 0
    """The bytes are there (a write: in the peer's memory)."""
    LOST = 1
    """The peer is gone or cannot be reached; whether bytes were written is not known."""
    REFUSED = 2
    """The peer has no such region, or it is smaller."""
    DAMAGED = 3
    """The bytes arrived wrong, more than once."""
    LATE = 4
    """Not done within the time given to `wait`."""


class Transfer(Protocol):
    """Moves under way."""

    def wait(self, timeout_s: float) -> list[Moved]:
        """One result a move, in order. Afterwards the transfer is over: what is not done by then is LATE."""
        ...


class Transport(Protocol):
    """One process's end. All calls are thread-safe. Errors of use raise: InvalidInput for an unknown peer or local
    region or a move outside of it, ConfigError at construction if this machine lacks what it takes, MissingExtra if a
    library does. What happens to bytes on the way is a `Moved`."""

    @property
    def capabilities(self) -> Capabilities: ...
    def register(self, region: str, memory: memoryview, path: str = "") -> None:
        """Let peers read and write this memory (writable, contiguous). `path`: the file that it maps from its start."""
        ...

    def release(self, region: str) -> None:
        """Take it back, when moves that use it have ended; the memory may be unmapped then. A peer that still uses it
        gets REFUSED or LOST (with `mapped_only`: what the file then holds). Raises Unavailable if a move does not end
        within seconds."""
        ...

    def describe(self) -> bytes:
        """What a peer needs to reach the regions registered so far. A secret: who has it may read and write them."""
        ...

    def connect(self, description: bytes) -> str:
        """The peer's name for `read` and `write`. Raises LayoutMismatch if another kind of transport described itself,
        Unavailable if the peer cannot be reached."""
        ...

    def read(self, peer: str, moves: Sequence[Move]) -> Transfer: ...
    def write(self, peer: str, moves: Sequence[Move]) -> Transfer: ...
    def close(self) -> None:
        """Transfers under way end as LOST."""
        ...
