"""What the parts of a store node promise each other. Implementations (`live/`, fakes) pass one suite each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from anabranch.store.values.got import Got
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Key


class Place(msgspec.Struct, frozen=True):
    """Where a node's arena has a value: bytes `offset` … `offset + size`."""

    offset: int
    size: int
    generation: int


class Record(msgspec.Struct, frozen=True):
    """Everything about a value but its bytes; what a disk keeps beside it."""

    name: bytes
    scope: bytes
    size: int
    sums: tuple[int, ...]
    parent: bytes = b""


class SharedIndex(Protocol):
    """Name → Place in shared memory: one writer process, any number of readers that take no lock and make no call.
    A reader copies bytes, then asks `still`: only if that is true were they the value's."""

    def put(self, name: bytes, scope: bytes, place: Place) -> bool:
        """False: the index is full (the value can still be had through the node)."""
        ...

    def discard(self, name: bytes) -> None: ...
    def find(self, name: bytes, scope: bytes) -> Place | None: ...
    def find_many(self, names: bytes, scope: bytes) -> list[Place | None]: ...
    def present(self, names: bytes, scope: bytes) -> bytes:
        """One byte a name, 1 = there."""
        ...

    def still(self, name: bytes, place: Place) -> bool: ...


class KeyTable(Protocol):
    """The directory's table: name → up to four (member, tiers). Members are small integers (0 … 8190) that the owner
    hands out; `tier` is the tier's bit (dram 1, ssd 2, backing 4), or several. At most 100 bytes a name at 10 million
    names; no operation takes longer than some milliseconds (it grows in parts)."""

    def add(self, member: int, tier: int, names: bytes) -> int:
        """Returns how many of the names this member did not hold in any tier before (a fifth holder is not kept)."""
        ...

    def discard(self, member: int, tier: int, names: bytes) -> int:
        """Returns how many of the names this member now holds in no tier any more."""
        ...

    def places(self, names: bytes) -> bytes:
        """[names][4] native uint16: 0 nothing, else 1 + (member << 3 | tier bits); a name's zeros come last."""
        ...

    def held(self, members: Iterable[int], at: int, count: int) -> tuple[bytes, int]:
        """Of `count` entries from position `at` on: the names that one of `members` holds; and the next position, 0 at
        the end. Entries added or removed meanwhile may be missed or seen twice."""
        ...

    def sweep(self, dead: Iterable[int], at: int, count: int) -> int:
        """Forget the members `dead` in `count` entries from position `at`; returns the next position, 0 at the end.
        Positions are those of `held`, and a sweep moves no entry that `held` has yet to see."""
        ...

    def forget(self, member: int) -> None:
        """All at once; for tests and small tables."""
        ...

    def __len__(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...


class DiskTier(Protocol):
    """The SSD tier: a log of large segments under one folder. Calls block; a node makes them on its disk threads. All
    methods are thread-safe. `present` and `records` are answered from memory."""

    def append(self, batch: Sequence[tuple[Record, memoryview]], *, durable: bool) -> list[Outcome]:
        """Write values, in as few writes as possible: OK, PRESENT, FULL (after one forced eviction and one retry:
        writes pause, `state` says so) or STALE (scope invalidated meanwhile). `durable`: they survive a crash of the
        machine once this returns. Evicts whole segments, least useful first, to stay within its bytes."""
        ...

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        """Fill buffers (each exactly of its value's size), neighbours in one read, every slice checked. A damaged one
        is forgotten: DAMAGED."""
        ...

    def record(self, name: bytes) -> Record | None: ...
    def present(self, names: bytes) -> bytes: ...
    def remove(self, names: Sequence[bytes]) -> list[Outcome]: ...
    def invalidate(self, scopes: Sequence[bytes]) -> int:
        """Forget all values of these scopes, for good (also after a crash and restart); how many went."""
        ...

    def names(self) -> Iterable[bytes]: ...
    def take_evicted(self) -> list[bytes]:
        """Names that left since the last call without `remove`."""
        ...

    @property
    def state(self) -> str:
        """ "" or why it does not take writes."""
        ...

    @property
    def count(self) -> int:
        """Values that it has."""
        ...

    @property
    def used_bytes(self) -> int: ...
    def close(self) -> None: ...


class BackingTier(Protocol):
    """A tier that all nodes share: a folder on any file system, or an object store. Values are packed into large
    objects with an index each. Calls block."""

    def store(self, batch: Sequence[tuple[Record, memoryview]]) -> list[Outcome]: ...
    def load(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]: ...
    def record(self, name: bytes) -> Record | None: ...
    def present(self, names: bytes) -> bytes: ...
    def refresh(self) -> int:
        """Learn of objects that others wrote; how many were new."""
        ...

    def remove(self, names: Sequence[bytes]) -> list[Outcome]: ...
    def invalidate(self, scopes: Sequence[bytes]) -> int: ...
    def close(self) -> None: ...


class Cipher(Protocol):
    """Per-tenant encryption of what leaves DRAM (`store.values.live.encryption`)."""

    def seal(self, record: Record, data: memoryview) -> bytes | memoryview: ...
    def open(self, record: Record, data: memoryview) -> bytes | memoryview:
        """Raises IntegrityError; StaleLease if the scope's key is gone."""
        ...

    def overhead(self, scope: bytes, size: int) -> int:
        """Bytes that a sealed value of `size` bytes is longer (each slice is sealed by itself); 0 for a scope that is
        not encrypted. Raises StaleLease if the scope's key is gone."""
        ...


class StoreClient(Protocol):
    """What connectors ask of `anabranch.Client`, whose docstrings are the promises; `AsyncClient` has the same calls as
    coroutines. Keys are str or bytes, values and buffers are buffers or lists of parts (`store.values.parts`)."""

    def put_many(
        self,
        keys: Sequence[Key],
        values: Sequence[Any],
        *,
        replicas: int = 0,
        durable: bool = False,
        chain: bool = False,
        parent: Key | None = None,
    ) -> list[Outcome]: ...
    def get_many_into(self, keys: Sequence[Key], buffers: Sequence[Any]) -> list[Got]: ...
    def exists_many(self, keys: Sequence[Key]) -> list[bool | None]: ...
    def longest_prefix(self, keys: Sequence[Key]) -> int: ...
    def remove(self, keys: Sequence[Key]) -> list[Outcome]: ...
    def prefetch(self, keys: Sequence[Key]) -> list[Outcome]: ...
    def pin(self, keys: Sequence[Key], seconds: float) -> list[Outcome]: ...
    def unpin(self, keys: Sequence[Key]) -> list[Outcome]: ...
    def invalidate(self, *, epoch: str | None = None, tenant: str | None = None) -> dict[str, int]: ...
    def close(self) -> None: ...
