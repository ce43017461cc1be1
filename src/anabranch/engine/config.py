"""Settings of one engine."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Role = Literal["prefill", "decode", "both"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`step_tokens` is the compute quota of one step in token equivalents: a token at position p costs
    1 + p / cost_context (`ModelInfo.cost_context`), so a step's time stays level as contexts grow."""

    block_tokens: Annotated[int, Meta(ge=1, le=4096, description="Tokens in a block.")] = 16
    step_tokens: Annotated[int, Meta(ge=1, description="Compute quota of one step, in token equivalents.")] = 512
    max_running: Annotated[int, Meta(ge=1, description="Sequences in one step at most.")] = 256
    max_waiting: Annotated[int, Meta(ge=1, description="Requests queued before new ones are refused.")] = 1024
    threads: Annotated[int, Meta(ge=0, description="Compute threads; 0 = one per CPU.")] = 0
    handoff_timeout_s: Annotated[float, Meta(gt=0, description="A hand-off that takes longer has failed.")] = 300.0
    load_timeout_s: Annotated[float, Meta(gt=0, description="A load that takes longer becomes a recomputation.")] = 10.0
    spare_slots: Annotated[int, Meta(ge=0, description="Slots kept free for requests that are running.")] = 8
