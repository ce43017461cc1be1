"""Bytes of K/V: per token, per block, per sequence; and how many sequences, or how long a one, fit in a memory.

All figures are for one tensor-parallel rank. "Held" is what an engine must keep to go on decoding: a sliding-window
layer drops what is behind its window. "Stored" is what a store keeps so that any prefix can be taken up again: every
block, whole.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.blocks.models.architecture import Architecture, LayerKeeps
from anabranch.core.errors import ConfigError

KvDtype = Literal["float32", "float16", "bfloat16", "fp8"]
ELEMENT_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}
LONGEST_CONTEXT = 1 << 40


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Arithmetic over one architecture. Raises ConfigError on a setting below 1 or an unknown dtype."""

    architecture: Architecture
    dtype: str
    block_tokens: int = 16
    tp: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.tp < 1:
            raise ConfigError(f"block tokens and tp must be at least 1, got {self.block_tokens} and {self.tp}")
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; known are {', '.join(ELEMENT_BYTES)}")

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token adds while no window is full: all layers with K/V."""
        return sum(self._token_layer_bytes(layer) for layer in self.architecture.layers)

    @property
    def growing_token_bytes(self) -> int:
        """Bytes that one more token adds once every window is full: layers without a window only."""
        return sum(self._token_layer_bytes(layer) for layer in self.architecture.layers if not layer.window)

    @property
    def full_block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens

    @property
    def layer_block_bytes(self) -> tuple[int, int]:
        """Smallest and largest Layer Block (they differ where layers have different heads); (0, 0) without K/V."""
        sizes = [
            self._token_layer_bytes(layer) * self.block_tokens for layer in self.architecture.layers if layer.heads
        ]
        return (min(sizes), max(sizes)) if sizes else (0, 0)

    @property
    def state_bytes(self) -> int:
        """Constant bytes per sequence, whatever its length."""
        wide = ELEMENT_BYTES.get(self.architecture.state_dtype, ELEMENT_BYTES[self.dtype])
        narrow = ELEMENT_BYTES[self.dtype]
        total = sum(
            layer.recurrent_elements * wide + (layer.state_elements - layer.recurrent_elements) * narrow
            for layer in self.architecture.layers
        )
        return -(-total // self.tp)

    def held_bytes(self, context: int) -> int:
        """What an engine holds for one sequence of `context` tokens, in whole blocks."""
        return self.state_bytes + sum(
            self._blocks(layer, context) * self.block_tokens * self._token_layer_bytes(layer)
            for layer in self.architecture.layers
        )

    def stored_bytes(self, context: int) -> int:
        """What a store keeps of one sequence: its full blocks, windows or not. State has no blocks: not stored."""
        return context // self.block_tokens * self.full_block_bytes

    def max_concurrency(self, context: int, memory: int) -> int | None:
        """Sequences of `context` tokens that fit in `memory` bytes; None: nothing grows, no bound."""
        each = self.held_bytes(context)
        return memory // each if each else None

    def max_context(self, concurrency: int, memory: int) -> int | None:
        """Longest context, in whole blocks, at which `concurrency` sequences fit; None: it does not depend on the
        context. 0: not even one block fits."""
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
        each = memory // concurrency
        if self.held_bytes(LONGEST_CONTEXT) <= each:
            return None
        low, high = 0, LONGEST_CONTEXT // self.block_tokens  # low fits (or is 0), high does not
        while high - low > 1:
            middle = (low + high) // 2
            if self.held_bytes(middle * self.block_tokens) <= each:
                low = middle
            else:
                high = middle
        return low * self.block_tokens

    def _token_layer_bytes(self, layer: LayerKeeps) -> int:
        return layer.elements_per_token(self.tp) * ELEMENT_BYTES[self.dtype]

    def _blocks(self, layer: LayerKeeps, context: int) -> int:
        """A window of W tokens that does not begin at a block's edge touches one block more than W fills."""
        blocks = -(-context // self.block_tokens)
        if not layer.window:
            return blocks
        return min(blocks, (layer.window - 2 + self.block_tokens) // self.block_tokens + 1)
