"""What an engine is asked for and what it answers, independent of any protocol."""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "failed"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose the next token. Defaults are greedy-neutral; ranges are validated at the gateway.

    temperature 0 is greedy. top_k 0 = off, min_p 0 = off. `logprobs`: None = none, k = the chosen token's
    and the k most likely (0 ≤ k ≤ 20). Randomness is a function of (seed, choice index, position) alone,
    so a hand-off, a preemption or a batch mate never changes what is drawn.
    Order: logit bias → penalties → temperature → top-k → top-p → min-p.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. `root` and `hash_key` start the block-key chain (`blocks.hashing.PrefixChain`).

    `cacheable` False: neither look up nor publish blocks (an identity field could not be encoded, or opt-out).
    `deadline_s`: seconds from arrival after which the request is cancelled.
    """

    request_id: str
    tokens: list[int]
    sampling: SamplingParams
    n: int = 1
    root: bytes = b""
    hash_key: bytes = b""
    tenant: str = "default"
    cacheable: bool = True
    deadline_s: float = 600.0


class TokenLogprob(msgspec.Struct, frozen=True):
    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by origin. computed + hbm + dram + ssd + peer == prompt, exactly.

    hbm/dram: found in this engine's own node (no copy / arena); ssd: read from this node's SSD tier;
    peer: pulled from another node over the network.
    """

    prompt: int = 0
    computed: int = 0
    dram: int = 0
    ssd: int = 0
    peer: int = 0

    @property
    def cached(self) -> int:
        return self.dram + self.ssd + self.peer
