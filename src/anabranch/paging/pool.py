"""The slots of one arena: who may use them, what they hold, what goes first.

Integers and opaque keys only. States of a slot:  FREE → RESERVED (private, refs ≥ 1) → COMMITTED (named; refs ≥ 0)
→ FREE. A committed slot with no reference is *cached*: readable and evictable. A committed slot whose name is removed
while it is referenced is REMOVED: private until its last reference goes. Every reuse bumps the slot's generation (it
grows when the slot becomes FREE, so a lease on what it held is stale from then on).

**Covers** one tier's slots. **Does not cover** leases' end times (`store.leases`) or an engine's own counts
(`paging.block_table`). **See also** `paging.prefix_tree` for what may be evicted, `policy.eviction` for what is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Literal

import msgspec

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.paging.allocator import SlotAllocator
from anabranch.paging.prefix_tree import PrefixTree
from anabranch.policy.eviction.contract import EvictionPolicy
from anabranch.policy.eviction.lru import Lru


class Evicted(msgspec.Struct, frozen=True):
    """`generation` is the one under which the slot held the block."""

    slot: int
    generation: int
    key: bytes
    parent: bytes


class Resident(msgspec.Struct, frozen=True):
    slot: int
    generation: int
    key: bytes
    parent: bytes
    refs: int


class State(Enum):
    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    REMOVED = 3


class SlotPool:
    """Allocator, prefix tree and reference counts over `slots` slots. O(log slots) amortised per slot at most
    (a reference on a block whose ancestors nobody references costs one step for each of those ancestors).

    Eviction: cached slots only, children before parents, among leaves in the order of `policy` (least recently used
    first if none is given); never a referenced slot; a committed block whose parent is not resident stays evictable
    like any other. A block counts as used until the last reference on it or on a descendant is gone; an
    unreferenced ancestor of a referenced block is not evictable.

    Raises InvariantBroken for a slot number outside the pool.
    """

    def __init__(self, slots: int, policy: EvictionPolicy | None = None) -> None:
        self._allocator = SlotAllocator(slots)
        self._tree = PrefixTree(Lru() if policy is None else policy)
        self._states = [State.FREE] * slots
        self._refs = [0] * slots
        self._keys: list[bytes | None] = [None] * slots
        self._evicted: list[Evicted] = []

    @property
    def slots(self) -> int:
        return self._allocator.slots

    @property
    def free(self) -> int:
        """Slots that are FREE."""
        return len(self._allocator)

    @property
    def evictable(self) -> int:
        """Cached slots that eviction could free now (children-first always gets to all unreferenced chains)."""
        return self._tree.evictable

    @property
    def resident(self) -> int:
        """Slots that are COMMITTED."""
        return len(self._tree)

    def generation(self, slot: int) -> int:
        return self._allocator.generation(slot)

    def state(self, slot: int) -> State:
        return self._states[self._known(slot)]

    def refs(self, slot: int) -> int:
        return self._refs[self._known(slot)]

    def key(self, slot: int) -> bytes | None:
        """The name of a committed slot, else None."""
        return self._keys[self._known(slot)]

    def residents(self) -> list[Resident]:
        """All committed slots, for an announcement: O(resident)."""
        return [
            Resident(node.slot, self.generation(node.slot), node.key, node.parent_key, self._refs[node.slot])
            for node in self._tree.residents()
        ]

    def reserve(self, count: int) -> list[int] | None:
        """`count` private slots with one reference each, evicting as needed; None (nothing changed) if impossible."""
        if count < 0:
            raise InvalidInput(f"cannot reserve {count} slots")
        if count > self.free + self.evictable:
            return None
        while self.free < count:
            self._evict()
        return [self._private(self._allocator.take(), 1) for _ in range(count)]

    def claim(self, slot: int, count: int = 1) -> bool:
        """Reserve this very slot with `count` references (a restarted node confirms what its engine still uses).
        False if it is not FREE."""
        _positive(count)
        if not self._allocator.take_slot(slot):
            return False
        self._private(slot, count)
        return True

    def drain_evicted(self) -> list[Evicted]:
        """What eviction removed since the last call, in order: the owner announces it."""
        drained, self._evicted = self._evicted, []
        return drained

    def commit(self, slot: int, key: bytes, parent: bytes) -> Literal["published", "duplicate"]:
        """Name a reserved slot. "duplicate": the key is already resident in another slot; this one stays private.
        Raises InvariantBroken if the slot is not RESERVED, InvalidInput if the key is empty or its own ancestor."""
        if self.state(slot) is not State.RESERVED:
            raise InvariantBroken(f"commit of slot {slot}, which is {self._states[slot].name} and not RESERVED")
        if self._tree.find(key) is not None:
            return "duplicate"
        self._tree.insert(key, parent, slot)
        self._states[slot] = State.COMMITTED
        self._keys[slot] = key
        return "published"

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Slots of the longest resident run of `keys` from the first on. Changes nothing (no reference, no recency)."""
        slots: list[int] = []
        for key in keys:
            slot = self._tree.find(key)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def get(self, key: bytes) -> int | None:
        return self._tree.find(key)

    def acquire(self, keys: Sequence[bytes]) -> list[int]:
        """`match`, and take one reference on each and mark it recently used."""
        slots = self.match(keys)
        for slot in slots:
            self.use(slot)
        return slots

    def use(self, slot: int) -> None:
        """`ref` by someone who asked for the block, as opposed to a transfer that moves it: eviction learns from it."""
        self.ref(slot)
        if self._states[slot] is State.COMMITTED:
            self._tree.reuse(self._name(slot))

    def favour(self, keys: Iterable[bytes], strength: int) -> int:
        """Soft pin: eviction should value those of `keys` that are resident 1 + `strength` times as much; the wish
        fades as other blocks come (0 ends it now). No reservation fails for it. Returns how many."""
        if strength < 0:
            raise InvalidInput(f"a soft pin needs a strength of at least 0, got {strength}")
        found = [key for key in keys if self._tree.find(key) is not None]
        for key in found:
            self._tree.favour(key, strength)
        return len(found)

    def ref(self, slot: int, count: int = 1) -> None:
        """More references on a slot that has at least one, or is committed. Raises InvariantBroken otherwise."""
        _positive(count)
        state = self.state(slot)
        if state is State.FREE:
            raise InvariantBroken(f"reference on slot {slot}, which is FREE")
        self._refs[slot] += count
        if state is State.COMMITTED and self._refs[slot] == count:
            self._tree.hold(self._name(slot))

    def unref(self, slot: int, count: int = 1) -> bool:
        """Fewer references. A RESERVED slot at zero becomes FREE, a COMMITTED one cached. True if now FREE.
        Raises InvariantBroken on a double free."""
        _positive(count)
        if self.refs(slot) < count:
            raise InvariantBroken(f"slot {slot} has {self._refs[slot]} references, {count} were given back")
        self._refs[slot] -= count
        if self._refs[slot]:
            return False
        if self._states[slot] is State.COMMITTED:
            self._tree.release(self._name(slot))
            return False
        self._release(slot)
        return True

    def remove(self, key: bytes) -> int | None:
        """Forget a name (bad checksum, invalidation). The slot is freed now, or, if referenced, when the last reference
        goes (it can no longer be found). Returns its slot, None if absent."""
        slot = self._tree.remove(key)
        if slot is None:
            return None
        self._keys[slot] = None
        if self._refs[slot]:
            self._states[slot] = State.REMOVED
        else:
            self._release(slot)
        return slot

    def check(self) -> None:
        """Raise InvariantBroken if the books do not add up. O(slots)."""
        self._tree.check()
        for slot, state in enumerate(self._states):
            key, refs = self._keys[slot], self._refs[slot]
            sound = (
                self._allocator.is_free(slot) == (state is State.FREE)
                and (key is not None) == (state is State.COMMITTED)
                and (key is None or self._tree.find(key) == slot)
                and (refs > 0 if state in (State.RESERVED, State.REMOVED) else refs >= 0)
                and (refs == 0 or state is not State.FREE)
            )
            if not sound:
                raise InvariantBroken(f"slot {slot} is {state.name} with {refs} references and key {key!r}")
        if self._states.count(State.COMMITTED) != self.resident:
            raise InvariantBroken("committed slots and resident blocks differ in number")

    def _known(self, slot: int) -> int:
        if not 0 <= slot < len(self._refs):
            raise InvariantBroken(f"slot {slot} is outside 0…{len(self._refs) - 1}")
        return slot

    def _name(self, slot: int) -> bytes:
        key = self._keys[slot]
        if key is None:
            raise InvariantBroken(f"committed slot {slot} has no name")
        return key

    def _private(self, slot: int, refs: int) -> int:
        self._states[slot] = State.RESERVED
        self._refs[slot] = refs
        return slot

    def _release(self, slot: int) -> None:
        self._states[slot] = State.FREE
        self._keys[slot] = None
        self._allocator.give(slot)

    def _evict(self) -> None:
        slot, key, parent = self._tree.pop_victim()
        self._evicted.append(Evicted(slot, self.generation(slot), key, parent))
        self._release(slot)


def _positive(count: int) -> None:
    if count < 1:
        raise InvariantBroken(f"a reference count must change by at least 1, not {count}")
