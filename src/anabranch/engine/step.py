"""One engine step, as the scheduler plans it and the driver runs it."""

from __future__ import annotations

from anabranch.engine.handoff import Push
from anabranch.engine.runner import Chunk
from anabranch.engine.sequence import Sequence
from anabranch.paging.block_table import CopyOrder


class Step:
    """`copies` first, in order; then one forward pass over `chunks`.

    `loads`: operations whose layers the pass must wait for, layer by layer; `pushes`: what to send on at each layer's
    end. `parts[i]` is the sequence behind `chunks[i]`.
    """

    __slots__ = ("chunks", "copies", "loads", "number", "parts", "pushes")

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunks: list[Chunk] = []
        self.parts: list[Sequence] = []
        self.copies: list[CopyOrder] = []
        self.loads: list[int] = []
        self.pushes: list[Push] = []

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)
