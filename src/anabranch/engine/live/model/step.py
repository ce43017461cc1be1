"""One forward pass as flat arrays: all tokens of all chunks in one row dimension."""

from __future__ import annotations

from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from anabranch.core.errors import InvariantBroken
from anabranch.engine.live.model_files import ModelShape
from anabranch.engine.runner import Chunk, LayerGate

Ints = npt.NDArray[np.int32]


class Step(msgspec.Struct, frozen=True):
    """`rows` = all tokens in batch order. Chunk c owns rows first[c] … first[c+1]-1 and pages table[c] … table[c+1]-1.

    `slots`/`offsets`: where each row's K/V goes. `sampled`: the rows whose logits are wanted, in batch order.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    offsets: Ints
    first: Ints
    start: Ints
    table: Ints
    pages: Ints
    sampled: Ints

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def chunks(self) -> int:
        return len(self.start)


class Layers(Protocol):
    """A model's forward pass over paged K/V."""

    def forward(self, step: Step, gate: LayerGate) -> torch.Tensor:
        """Logits [len(step.sampled), vocab] float32, valid until the next call."""

    def close(self) -> None:
        """Give back threads and the view of the pages."""


def build_step(batch: list[Chunk], shape: ModelShape, block_tokens: int, slots: int) -> Step:
    """Raises InvariantBroken if a chunk's tokens, positions or pages cannot be."""
    tokens: list[int] = []
    pages: list[int] = []
    first, table, sampled = [0], [0], []
    for chunk in batch:
        _check(chunk, shape, block_tokens)
        tokens += chunk.tokens
        pages += chunk.pages
        first.append(len(tokens))
        table.append(len(pages))
        if chunk.sample:
            sampled.append(len(tokens) - 1)
    page_array = np.asarray(pages, np.int32)
    token_array = np.asarray(tokens, np.int32)
    if page_array.min() < 0 or page_array.max() >= slots:
        raise InvariantBroken(f"a block table names page {int(page_array.max())}, the arena has {slots}")
    if token_array.min() < 0 or token_array.max() >= shape.vocab:
        raise InvariantBroken(f"token id outside the vocabulary of {shape.vocab}")
    starts = np.asarray([chunk.start for chunk in batch], np.int32)
    bounds = np.asarray(first, np.int32)
    counts = bounds[1:] - bounds[:-1]
    within = np.arange(len(tokens), dtype=np.int32) - np.repeat(bounds[:-1], counts)
    positions = within + np.repeat(starts, counts)
    where = positions // block_tokens + np.repeat(np.asarray(table[:-1], np.int32), counts)
    return Step(
        token_array,
        positions,
        page_array[where],
        positions % block_tokens,
        bounds,
        starts,
        np.asarray(table, np.int32),
        page_array,
        np.asarray(sampled, np.int32),
    )


def _check(chunk: Chunk, shape: ModelShape, block_tokens: int) -> None:
    end = chunk.start + len(chunk.tokens)
    if not chunk.tokens or chunk.start < 0:
        raise InvariantBroken(f"sequence {chunk.seq}: a chunk needs at least one token and a start ≥ 0")
    if end > shape.context_tokens:
        raise InvariantBroken(
            f"sequence {chunk.seq}: position {end - 1} is beyond the context of {shape.context_tokens}"
        )
    if len(chunk.pages) * block_tokens < end:
        raise InvariantBroken(f"sequence {chunk.seq}: {len(chunk.pages)} pages do not cover {end} tokens")
