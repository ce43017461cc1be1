"""Which blocks were asked for together: prompts, told block by block, in pieces and beside each other.

**Covers** putting a prompt together. **Does not cover** what follows from it (`cost`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from anabranch.policy.eviction.contract import Block

OPEN = 64


class Prompt:
    """`fresh`: how many of its blocks nobody knew. `clock`: when its last block was asked for."""

    __slots__ = ("blocks", "clock", "fresh")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.fresh = 0
        self.clock = 0


class Prompts:
    """A block continues the prompt that ended with its parent. `ended(prompt)` is called once for each, when its last
    block is no longer used or goes, or when more than OPEN are open. `clock`: blocks asked for so far.

    Blocks that were resident are told in a row (`reused`), so there the depth says whether one continues the last."""

    def __init__(self, ended: Callable[[Prompt], None]) -> None:
        self.clock = 0
        self._ended = ended
        self._current = Prompt()
        self._others: OrderedDict[bytes, Prompt] = OrderedDict()

    def reused(self, block: Block) -> None:
        blocks = self._current.blocks
        if blocks and blocks[-1].depth + 1 != block.depth:
            self._switch(Prompt())
        self._append(block)

    def inserted(self, block: Block, parent: Block | None, *, fresh: bool) -> None:
        blocks = self._current.blocks
        if parent is None:
            self._switch(Prompt())
        elif not blocks or blocks[-1] is not parent:
            self._switch(self._others.pop(parent.key) if parent.key in self._others else Prompt())
        self._current.fresh += fresh
        self._append(block)

    def left(self, block: Block) -> None:
        """It is no longer in use, or went."""
        blocks = self._current.blocks
        if blocks and blocks[-1] is block:
            prompt, self._current = self._current, Prompt()
            self._ended(prompt)
        elif self._others:
            other = self._others.pop(block.key, None)
            if other is not None:
                self._ended(other)

    def _append(self, block: Block) -> None:
        self.clock += 1
        self._current.blocks.append(block)
        self._current.clock = self.clock

    def _switch(self, prompt: Prompt) -> None:
        parked, self._current = self._current, prompt
        if not parked.blocks:
            return
        end = parked.blocks[-1].key
        same = self._others.pop(end, None)
        self._others[end] = parked
        if same is None and len(self._others) > OPEN:
            _, same = self._others.popitem(last=False)
        if same is not None:
            self._ended(same)
