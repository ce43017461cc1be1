"""The paced engine: real blocks and real bytes, compute that takes the time a device model says.

Wraps the tripwire runner, so the data plane is checked byte by byte while one small machine plays a cluster of GPUs.
The clock and the sleep are given: a live engine passes the system's, a test passes its own.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from anabranch.engine.runner import Chunk, LayerGate, ModelInfo, ModelRunner, Sampled
from anabranch.policy.batching import chunk_cost


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """A step takes `base_s` + `token_s` × Σ cost of its tokens (in token equivalents, see `policy.batching`)."""

    base_s: float = 0.010
    token_s: float = 0.000_05

    def step_s(self, batch: list[Chunk], cost_context: float) -> float:
        cost = sum(chunk_cost(chunk.start, len(chunk.tokens), cost_context) for chunk in batch)
        return self.base_s + self.token_s * cost


class PacedGate:
    """Passes `wait` and `done` on, each layer's `done` not before its share of the step's time has passed."""

    def __init__(
        self, gate: LayerGate, layer_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._gate = gate
        self._layer_s = layer_s
        self._clock = clock
        self._sleep = sleep
        self._due = 0.0

    def wait(self, layer: int) -> None:
        """Time spent waiting is not compute time: it pushes the due times back."""
        before = self._clock()
        self._gate.wait(layer)
        now = self._clock()
        self._due = now if layer == 0 else self._due + (now - before)
        self._due += self._layer_s

    def done(self, layer: int) -> None:
        left = self._due - self._clock()
        if left > 0:
            self._sleep(left)
        self._gate.done(layer)


class PacedRunner:
    """A `ModelRunner` that computes what `inner` does in the time that `pace` says (or longer, if it is slower)."""

    def __init__(
        self, inner: ModelRunner, pace: Pace, *, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.info: ModelInfo = inner.info
        self.needs_history = bool(getattr(inner, "needs_history", False))
        self._inner = inner
        self._pace = pace
        self._clock = clock
        self._sleep = sleep

    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        layer_s = self._pace.step_s(batch, self.info.cost_context) / self.info.layout.layers
        return self._inner.run(batch, PacedGate(gate, layer_s, self._clock, self._sleep))

    def copy_page(self, src: int, dst: int, tokens: int) -> None:
        self._inner.copy_page(src, dst, tokens)

    def close(self) -> None:
        self._inner.close()
