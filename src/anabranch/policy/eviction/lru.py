"""Least recently used first."""

from __future__ import annotations

import heapq

from anabranch.policy.eviction.contract import Block


class Lru:
    """The leaf whose use ended first goes first. Soft pins mean nothing to it.

    A heap of (end of use, key): O(log leaves) per offer; withdrawn entries are dropped when they surface, and the
    heap is rebuilt when they are more than half of it."""

    def __init__(self) -> None:
        self._offered: dict[bytes, Block] = {}
        self._heap: list[tuple[int, bytes]] = []

    def inserted(self, block: Block, parent: Block | None, now: int) -> None:
        pass

    def reused(self, block: Block, now: int) -> None:
        pass

    def favoured(self, block: Block, strength: int, now: int) -> None:
        pass

    def offer(self, block: Block, now: int) -> None:
        self._offered[block.key] = block
        heapq.heappush(self._heap, (block.used, block.key))
        if len(self._heap) > 64 + 2 * len(self._offered):
            self._heap = [(b.used, b.key) for b in self._offered.values()]
            heapq.heapify(self._heap)

    def withdraw(self, block: Block) -> None:
        del self._offered[block.key]

    def victim(self, now: int) -> Block:
        while True:
            used, key = self._heap[0]
            block = self._offered.get(key)
            if block is not None and block.used == used:
                return block
            heapq.heappop(self._heap)

    def gone(self, block: Block, *, evicted: bool, now: int) -> None:
        pass
