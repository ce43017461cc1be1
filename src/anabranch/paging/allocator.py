"""Which slots are free, and how often each has been used.

**Covers** taking and giving back slots in O(1), generations, double-free detection.
**Does not cover** names and references (`paging.pool`).
"""

from __future__ import annotations

from anabranch.core.errors import InvalidInput, InvariantBroken


class SlotAllocator:
    """A free list over slots 0 … slots-1. A slot's generation grows when it is given back, so that a lease on an
    earlier use is recognisably stale from the moment the slot may be reused. Last in, first out: warm memory first."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise InvalidInput(f"a pool needs at least one slot, got {slots}")
        self._generations = [1] * slots
        self._free = dict.fromkeys(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        """Free slots."""
        return len(self._free)

    @property
    def slots(self) -> int:
        return len(self._generations)

    def is_free(self, slot: int) -> bool:
        return slot in self._free

    def generation(self, slot: int) -> int:
        return self._generations[self._known(slot)]

    def take(self) -> int:
        """Any free slot. Raises InvariantBroken when there is none."""
        if not self._free:
            raise InvariantBroken("took a slot from an empty free list")
        return self._free.popitem()[0]

    def take_slot(self, slot: int) -> bool:
        """This very slot; False (and nothing changed) if it is not free."""
        if self._known(slot) not in self._free:
            return False
        del self._free[slot]
        return True

    def give(self, slot: int) -> None:
        """Give a slot back. Raises InvariantBroken if it is free already."""
        if self._known(slot) in self._free:
            raise InvariantBroken(f"slot {slot} was freed twice")
        self._generations[slot] += 1
        self._free[slot] = None

    def _known(self, slot: int) -> int:
        if not 0 <= slot < len(self._generations):
            raise InvariantBroken(f"slot {slot} is outside 0…{len(self._generations) - 1}")
        return slot
