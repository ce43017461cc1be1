"""What the SSD tier holds and where. Pure: `store.live.ssd` does the reading and writing.

A slot is FREE, being written (reserved), or holds a block. Eviction is the arena's: children first, in the order of
the configured policy, never a slot that is being read. When the file system refuses to grow, slots that have no space
behind them are withheld until it has some again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from anabranch.core.errors import InvalidInput
from anabranch.paging.pool import SlotPool
from anabranch.store.slots import Changes, Named


class SsdEntry(msgspec.Struct, frozen=True):
    """A block found on disk. `sequence` grows with every write."""

    slot: int
    sequence: int
    block: Named


class SsdIndex:
    def __init__(self, pool: SlotPool, counters: Counter[str]) -> None:
        self.pool = pool
        self.blocks: dict[int, Named] = {}
        self.changes = Changes(added={}, removed={})
        self.withheld: list[int] = []
        self._writing: dict[bytes, int] = {}
        self._counters = counters

    def recover(self, entries: Iterable[SsdEntry]) -> None:
        """Take over what is on disk. Of two slots with one key the later write counts."""
        latest: dict[bytes, SsdEntry] = {}
        for entry in sorted(entries, key=lambda e: e.sequence):
            latest[entry.block.key] = entry
        done: set[bytes] = set()
        for entry in latest.values():
            chain = [entry]
            while (parent := latest.get(chain[-1].block.parent)) and parent.block.key not in done:
                chain.append(parent)
                if len(chain) > len(latest):
                    break
            for link in reversed(chain):
                if link.block.key not in done and self.pool.claim(link.slot):
                    done.add(link.block.key)
                    self._publish(link.slot, link.block)
                    self.pool.unref(link.slot)

    def run(self, keys: Sequence[bytes], tenant: bytes) -> list[int]:
        """Slots of the longest run of `keys` on disk that is the tenant's. Takes no reference."""
        run = self.pool.match(keys)
        for i, slot in enumerate(run):
            if self.blocks[slot].tenant != tenant:
                return run[:i]
        return run

    def pin(self, slots: Iterable[int]) -> None:
        """For a read, which is a use: eviction learns from it."""
        for slot in slots:
            self.pool.use(slot)

    def unpin(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.pool.unref(slot)

    def holds(self, key: bytes) -> bool:
        """On disk, or on its way."""
        return key in self._writing or self.pool.get(key) is not None

    def begin_write(self, key: bytes) -> int | None:
        """A slot for a block that is not held; evicts if it must. None when everything is in use."""
        slots = self.pool.reserve(1)
        for evicted in self.pool.drain_evicted():
            self._counters["evicted_ssd"] += 1
            del self.blocks[evicted.slot]
            self.changes.remove(evicted.key)
        if not slots:
            return None
        self._writing[key] = slots[0]
        return slots[0]

    def end_write(self, slot: int, block: Named, *, written: bool) -> None:
        self._writing.pop(block.key, None)
        if written:
            self._publish(slot, block)
        self.pool.unref(slot)

    def evict_for(self, slot: int, block: Named, real: int) -> int | None:
        """`slot` has no space behind it. Withhold it and every free slot from `real` on; return another slot for the
        block, made by one eviction if need be, or None."""
        self.withheld.append(slot)
        spare = self.pool.reserve(self.pool.free) or []
        self.withheld += [s for s in spare if s >= real]
        self.unpin(s for s in spare if s < real)
        del self._writing[block.key]
        return self.begin_write(block.key)

    def restore(self) -> None:
        """Try the withheld slots again."""
        withheld, self.withheld = self.withheld, []
        self.unpin(withheld)

    def remove(self, key: bytes) -> None:
        """A block turned out bad."""
        slot = self.pool.remove(key)
        if slot is not None:
            del self.blocks[slot]
            self.changes.remove(key)

    def take_changes(self) -> Changes:
        changes, self.changes = self.changes, Changes(added={}, removed={})
        return changes

    def _publish(self, slot: int, block: Named) -> None:
        try:
            outcome = self.pool.commit(slot, block.key, block.parent)
        except InvalidInput:
            outcome = "duplicate"
        if outcome == "published":
            self.blocks[slot] = block
            self.changes.add(block.key)
