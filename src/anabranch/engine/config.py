"""Settings of one engine."""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`step_tokens` is the compute quota of one step in token equivalents: a token at position p costs
    1 + p / cost_context (`ModelInfo.cost_context`), so a step's time stays level as contexts grow."""

    block_tokens: int = 16
    step_tokens: int = 512
    max_running: int = 256
    max_waiting: int = 1024
    threads: int = 0
    handoff_timeout_s: float = 60.0
    load_timeout_s: float = 10.0
    spare_slots: int = 8
