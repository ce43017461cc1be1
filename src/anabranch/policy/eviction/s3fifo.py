"""S3-FIFO: a small queue for newcomers, a main queue for what was asked for again, and a memory of what went.

After Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023), section 4, with two
changes that a prefix tree asks for: only leaves are looked at, and a queue's order among leaves is when each came into
the queue (in the paper, the head of the queue).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.policy.eviction.contract import Block

SMALL_SHARE = 10  # the small queue is meant to hold one tenth of the blocks
MOST_USES = 3
MAIN = 4  # `tag`: uses so far, 0…MOST_USES, plus MAIN if in the main queue


class S3Fifo:
    """`slots`: size of the pool; as many keys of evicted blocks are remembered. `mark` is the place in the queue.

    A victim from the small queue that was used in the meantime moves to the main queue; one from the main queue is
    put back once for each use, at most MOST_USES times. A remembered key that returns starts in the main queue.
    A soft pin counts as MOST_USES uses."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise InvalidInput(f"a pool needs at least one slot, got {slots}")
        self._slots = slots
        self._offered: dict[bytes, Block] = {}
        self._small: list[tuple[int, bytes]] = []
        self._main: list[tuple[int, bytes]] = []
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._in_small = 0
        self._resident = 0
        self._arrivals = 0

    def inserted(self, block: Block, parent: Block | None, now: int) -> None:
        self._arrivals += 1
        block.mark = self._arrivals
        self._resident += 1
        if block.key in self._ghosts:
            del self._ghosts[block.key]
            block.tag = MAIN
        else:
            block.tag = 0
            self._in_small += 1

    def reused(self, block: Block, now: int) -> None:
        if block.tag % MAIN < MOST_USES:
            block.tag += 1

    def favoured(self, block: Block, strength: int, now: int) -> None:
        block.tag = (block.tag & MAIN) + (MOST_USES if strength else 0)

    def offer(self, block: Block, now: int) -> None:
        self._offered[block.key] = block
        heap = self._main if block.tag & MAIN else self._small
        heapq.heappush(heap, (block.mark, block.key))
        if len(self._small) + len(self._main) > 64 + 2 * len(self._offered):
            self._rebuild()

    def withdraw(self, block: Block) -> None:
        del self._offered[block.key]

    def victim(self, now: int) -> Block:
        while True:
            small = self._in_small * SMALL_SHARE > self._resident
            block = self._head(small) or self._head(not small)
            if block is None:
                raise InvariantBroken("a victim was asked for, but no block was offered")
            if block.tag == 0 or block.tag == MAIN:
                return block
            self._keep(block)

    def gone(self, block: Block, *, evicted: bool, now: int) -> None:
        self._resident -= 1
        if block.tag & MAIN:
            return
        self._in_small -= 1
        if evicted:
            self._ghosts[block.key] = None
            if len(self._ghosts) > self._slots:
                self._ghosts.popitem(last=False)

    def _keep(self, block: Block) -> None:
        """Give a used block another round in the main queue."""
        self._arrivals += 1
        block.mark = self._arrivals
        if block.tag & MAIN:
            block.tag -= 1
        else:
            block.tag = MAIN
            self._in_small -= 1
        heapq.heappush(self._main, (block.mark, block.key))

    def _head(self, small: bool) -> Block | None:
        """The leaf that has been longest in one of the queues; entries of blocks that moved or left are dropped."""
        heap = self._small if small else self._main
        while heap:
            mark, key = heap[0]
            block = self._offered.get(key)
            if block is not None and block.mark == mark and (block.tag < MAIN) == small:
                return block
            heapq.heappop(heap)
        return None

    def _rebuild(self) -> None:
        self._small = [(b.mark, b.key) for b in self._offered.values() if b.tag < MAIN]
        self._main = [(b.mark, b.key) for b in self._offered.values() if b.tag >= MAIN]
        heapq.heapify(self._small)
        heapq.heapify(self._main)
