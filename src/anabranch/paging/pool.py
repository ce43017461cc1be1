"""The slots of one arena: who may use them, what they hold, what goes first (stub: the contract).

Integers and opaque keys only. States of a slot:  FREE → RESERVED (private, refs ≥ 1) → COMMITTED (named; refs ≥ 0)
→ FREE. A committed slot with no reference is *cached*: readable and evictable. Every reuse bumps the slot's generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec


class Evicted(msgspec.Struct, frozen=True):
    slot: int
    generation: int
    key: bytes
    parent: bytes


class SlotPool:
    """Allocator, prefix tree and reference counts over `slots` slots. O(1) amortised per slot for every operation.

    Eviction: cached slots only, children before parents, least recently used first; never a referenced slot; a
    committed block whose parent is not resident stays evictable like any other.
    """

    def __init__(self, slots: int) -> None:
        raise NotImplementedError

    @property
    def free(self) -> int:
        """Slots that are FREE."""
        raise NotImplementedError

    @property
    def evictable(self) -> int:
        """Cached slots that eviction could free now (children-first always gets to all unreferenced chains)."""
        raise NotImplementedError

    def generation(self, slot: int) -> int:
        raise NotImplementedError

    def reserve(self, count: int) -> list[int] | None:
        """`count` private slots with one reference each, evicting as needed; None (and nothing changed) if impossible."""
        raise NotImplementedError

    def drain_evicted(self) -> list[Evicted]:
        """What eviction removed since the last call, in order: the owner announces it and may move it to a lower tier."""
        raise NotImplementedError

    def commit(self, slot: int, key: bytes, parent: bytes) -> Literal["published", "duplicate"]:
        """Name a reserved slot. "duplicate": the key is already resident in another slot; this one stays private.
        Raises InvariantBroken if the slot is not RESERVED."""
        raise NotImplementedError

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the longest resident run of `keys` from the first on. Changes nothing (no reference, no recency)."""
        raise NotImplementedError

    def get(self, key: bytes) -> int | None:
        raise NotImplementedError

    def acquire(self, keys: Sequence[bytes]) -> list[int]:
        """`match`, and take one reference on each and mark it recently used."""
        raise NotImplementedError

    def ref(self, slot: int, count: int = 1) -> None:
        """More references on a slot that has at least one, or is committed."""
        raise NotImplementedError

    def unref(self, slot: int, count: int = 1) -> bool:
        """Fewer references. A RESERVED slot at zero becomes FREE, a COMMITTED one cached. True if now FREE.
        Raises InvariantBroken on a double free."""
        raise NotImplementedError

    def remove(self, key: bytes) -> int | None:
        """Forget a name (bad checksum, invalidation). The slot is freed now, or, if referenced, when the last reference
        goes (it can no longer be found). Returns its slot, None if absent."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise InvariantBroken if the books do not add up."""
        raise NotImplementedError
