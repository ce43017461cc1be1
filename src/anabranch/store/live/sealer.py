"""Checksums of freshly committed blocks, off the brain's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from anabranch.blocks.checksum import block_sum, layer_sum
from anabranch.store.actions import Seal, Sealed
from anabranch.transfer.live.arena import Arena


def slot_sum(arena: Arena, slot: int) -> int:
    """block_sum of what a slot holds now."""
    return block_sum([layer_sum(arena.layer(slot, layer)) for layer in range(arena.layout.layers)])


class Sealer:
    def __init__(self, arena: Arena, post: Callable[[Sealed], None]) -> None:
        self._arena = arena
        self._post = post
        self._queue: queue.SimpleQueue[Seal | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sealer", daemon=True)
        self._thread.start()

    def put(self, seal: Seal) -> None:
        self._queue.put(seal)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (seal := self._queue.get()) is not None:
            own = slot_sum(self._arena, seal.slot)
            conflict = seal.resident is not None and slot_sum(self._arena, seal.resident) != own
            self._post(Sealed(seal.slot, seal.key, own, seal.resident, conflict))
