"""The contract between the scheduler and whatever computes: torch, tripwire or paced.

A runner is stateless about requests except for what `StepBatch` carries, and owns no pages: it reads and writes
K/V in the slots it is told, in the memory it was given at construction (`[slots][Full Block]`, see `blocks.layout`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from anabranch.blocks.layout import KvLayout
from anabranch.engine.request import SamplingParams, TokenLogprob


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's share of a step: compute positions `start` … `start + len(tokens) - 1`.

    `pages`: the block table; page i holds positions i·block_tokens …; it covers start + len(tokens).
    K/V of positions < start are (or, layer by layer through `LayerGate.wait`, will be) in those pages.
    `sample`: draw this many tokens (one per choice, choice indices first_choice…) from the last position's logits.
    `history`: prompt + generated token ids so far including `tokens` — present only when sampling needs it (penalties,
    min_tokens) or the runner's `needs_history` asks for it.
    `prompt_tokens`: how many of `history` are prompt (presence/frequency penalties count generated ones only).
    """

    seq: int
    tokens: list[int]
    start: int
    pages: list[int]
    sample: int = 0
    first_choice: int = 0
    params: SamplingParams | None = None
    history: list[int] | None = None
    prompt_tokens: int = 0


class Sampled(msgspec.Struct, frozen=True):
    """Answer to one Chunk with sample > 0: `tokens[j]` belongs to choice first_choice + j."""

    seq: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None


class LayerGate(Protocol):
    """Couples a forward pass to transfers, layer by layer. Both calls come from the runner's thread."""

    def wait(self, layer: int) -> None:
        """Return once all cached K/V of `layer` that this step reads is in place, or known to have failed."""

    def done(self, layer: int) -> None:
        """All new K/V of `layer` has been written to its pages."""


class OpenGate:
    """A gate with nothing to wait for."""

    def wait(self, layer: int) -> None: ...

    def done(self, layer: int) -> None: ...


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the rest of the system needs to know about a model.

    `digest`: names the weights (any change of weights changes it). `cost_*`: relative compute cost of a token,
    cost(token at position p) = 1 + p / cost_context: `cost_context` is the context length at which attention costs
    as much as the linear layers.
    """

    name: str
    layout: KvLayout
    context_tokens: int
    vocab: int
    eos_token_ids: tuple[int, ...]
    digest: bytes
    cost_context: float = 3000.0


class ModelRunner(Protocol):
    """A runner may also have an attribute `needs_history: bool`; absent means False."""

    info: ModelInfo

    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        """One forward pass over all chunks; answers in batch order for chunks with sample > 0."""

    def copy_page(self, src: int, dst: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of every layer of a page (copy-on-write of a partial block)."""

    def close(self) -> None: ...
