"""What happens to a block after its commit: checksum, then SSD.

A block that waits for the disk stays evictable: only the few that are being written are pinned. The queue is bounded;
what does not fit, or was evicted before its turn, is dropped and counted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from anabranch.store.actions import NodeAction, Seal, Sealed, SsdWritten, WriteSsd
from anabranch.store.slots import Named, SlotBook
from anabranch.store.ssd_index import SsdIndex

PAUSE_S = 5.0
WRITING = 4  # blocks handed to the writer at a time: it never waits for the brain


class WriteBack:
    """`capacity`: blocks that may wait for the disk.

    A full file system: one forced eviction and one retry with space that exists; if that fails too, writes pause
    (`paused`, visible in the node's state) and are tried again after PAUSE_S.
    """

    def __init__(
        self,
        book: SlotBook,
        ssd: SsdIndex | None,
        capacity: int,
        counters: Counter[str],
        act: Callable[[NodeAction], None],
    ) -> None:
        self._book = book
        self._ssd = ssd
        self._capacity = max(capacity, 1)
        self._counters = counters
        self._act = act
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._writing = 0
        self._sealing = 0
        self._retried: set[bytes] = set()
        self._paused_at: float | None = None

    @property
    def pending(self) -> int:
        """Blocks that wait for a checksum or a write."""
        return len(self._waiting) + self._writing + self._sealing

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def committed(self, slot: int, key: bytes) -> None:
        self._sealing += 1
        self._book.pin([slot])
        self._act(Seal(slot, key))

    def recovered(self) -> None:
        """What a former process had committed but not written."""
        if self._ssd is not None:
            for slot, block in self._book.named.items():
                if not self._ssd.holds(block.key):
                    self._enqueue(slot, block.key)
            self._pump()

    def compare(self, slot: int, key: bytes, resident: int) -> None:
        """A second block of the same name: are the bytes the same?"""
        self._sealing += 1
        self._book.pin([slot, resident])
        self._act(Seal(slot, key, resident))

    def sealed(self, event: Sealed) -> None:
        self._sealing -= 1
        if event.resident is not None:
            self._counters["commit_conflicts"] += event.conflict
            self._book.unpin([event.slot, event.resident])
            return
        if self._book.seal(event.slot, event.key, event.block_sum) and self._ssd is not None:
            self._enqueue(event.slot, event.key)
        self._book.unpin([event.slot])
        self._pump()

    def written(self, event: SsdWritten, now: float) -> None:
        if self._ssd is None:
            return
        key = event.block.key
        if event.outcome == "full" and key not in self._retried:
            self._retried.add(key)
            self._counters["ssd_full"] += 1
            other = self._ssd.evict_for(event.ssd_slot, event.block, event.real)
            if other is not None:
                self._act(WriteSsd(event.slot, other, event.block))
                return
            self._pause(now)
        elif event.outcome == "full":
            self._ssd.end_write(event.ssd_slot, event.block, written=False)
            self._pause(now)
        else:
            self._ssd.end_write(event.ssd_slot, event.block, written=not event.outcome)
            self._counters["ssd_write_errors" if event.outcome else "ssd_written"] += 1
        self._retried.discard(key)
        self._writing -= 1
        self._book.unpin([event.slot])
        self._pump()

    def tick(self, now: float) -> None:
        if self._paused_at is not None and now - self._paused_at >= PAUSE_S and self._ssd is not None:
            self._paused_at = None
            self._ssd.restore()
            self._pump()

    def _enqueue(self, slot: int, key: bytes) -> None:
        if len(self._waiting) >= self._capacity or self.paused:
            self._counters["writes_dropped"] += 1
        else:
            self._waiting.append((slot, key))

    def _pump(self) -> None:
        """Hand the next blocks to the writer."""
        while self._waiting and self._writing < WRITING and self._ssd is not None and not self.paused:
            slot, key = self._waiting.popleft()
            block = self._book.named.get(slot)
            if block is None or block.key != key:
                self._counters["writes_dropped"] += 1
            elif not self._ssd.holds(key):
                self._write(self._ssd, slot, block)

    def _write(self, ssd: SsdIndex, slot: int, block: Named) -> None:
        ssd_slot = ssd.begin_write(block.key)
        if ssd_slot is None:
            self._counters["writes_dropped"] += 1
            return
        self._writing += 1
        self._book.pin([slot])
        self._act(WriteSsd(slot, ssd_slot, block))

    def _pause(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now
            self._counters["ssd_pauses"] += 1
