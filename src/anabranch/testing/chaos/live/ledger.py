"""What every named block must hold, and the scan that compares it with what nodes keep under that name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from anabranch.engine.runner import Chunk, ModelInfo, OpenGate
from anabranch.engine.tripwire import TripwireRunner
from anabranch.store.live.node_server import NodeServer
from anabranch.testing.chaos.workload import Ask

Keys = Callable[[Sequence[int], str], list[bytes]]


class Ledger:
    """Remembers the tokens behind every key that may be named."""

    def __init__(self, info: ModelInfo, keys: Keys, seed: int) -> None:
        self._info = info
        self._keys = keys
        self._random = random.Random(seed)
        self._known: dict[bytes, tuple[list[int], int]] = {}
        self.scanned = 0

    def add(self, ask: Ask) -> None:
        for answer, _ in ask.expected:
            tokens = ask.tokens + answer
            for index, key in enumerate(self._keys(tokens, ask.tenant)):
                self._known.setdefault(key, (tokens, index))

    def scan(self, node: NodeServer, sample: int | None = None) -> list[str]:
        """Compare named blocks of a running node (all, or a sample) with what they must hold."""
        slots = list(dict(node.node.book.named))
        if sample is not None and sample < len(slots):
            slots = self._random.sample(slots, sample)
        return [problem for slot in slots if (problem := self._check(node, slot))]

    def _check(self, node: NodeServer, slot: int) -> str:
        book = node.node.book
        before, generation = book.named.get(slot), book.pool.generation(slot)
        try:
            data = bytes(node.arena.block(slot))
        except ValueError:
            return ""  # the node is being stopped and has let go of its memory
        after = book.named.get(slot)
        if before is None or after is None or after.key != before.key or book.pool.generation(slot) != generation:
            return ""  # it changed while we looked
        self.scanned += 1
        known = self._known.get(before.key)
        if known is None:
            return f"{node.node_id} slot {slot} is named {before.key.hex()[:16]}, which nobody asked for"
        if data != self._block(*known):
            return (
                f"{node.node_id} slot {slot} does not hold block {known[1]} of {len(known[0])} tokens as its name says"
            )
        return ""

    def _block(self, tokens: list[int], index: int) -> bytes:
        """What block `index` of `tokens` must hold."""
        layout = self._info.layout
        start, end = index * layout.block_tokens, (index + 1) * layout.block_tokens
        memory = memoryview(bytearray(layout.full_block_bytes))
        runner = TripwireRunner(self._info, memory)
        chunk = Chunk(seq=0, tokens=tokens[start:end], start=start, pages=[0] * (index + 1), history=tokens[:end])
        runner.run([chunk], OpenGate())
        return bytes(memory)
