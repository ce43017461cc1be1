"""Which engines serve a request: load-bounded prefix affinity.

**Covers** the choice of a prefill and a decode engine from views, and the memory of who holds which prefix.
**Does not cover** the hand-off itself (`serving.lifecycle`) or where missing blocks come from (`policy.paths`).

Every candidate gets a price in token equivalents (the compute of one token at position 0), and the cheapest wins: what
waits there already, plus what would have to be computed or fetched there. So an engine that holds the prefix
attracts requests until its queue costs more than computing the prefix elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

Kind = Literal["disaggregated", "colocated"]


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`cost_context`: context length at which attention costs as much as the linear layers (`ModelInfo`).

    `fetch_cost`: price of a token that another node holds, relative to computing it. `push_cost`: the same for the
    hand-off. `sequence_cost`: price of one more sequence on a decode engine that runs one already.
    `local_tokens`: a prompt with at most this many tokens to compute is prefilled where it is decoded.
    """

    block_tokens: int
    cost_context: float = 3000.0
    fetch_cost: float = 0.1
    push_cost: float = 0.05
    sequence_cost: float = 64.0
    local_tokens: int = 64
    remembered_keys: int = 1 << 17


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    """`backlog` in token equivalents, `requests` waiting or running, `free_tokens` what fits into free pages."""

    engine_id: str
    role: str
    backlog: float = 0.0
    requests: int = 0
    free_tokens: int = 1 << 40


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """`keys` name the full blocks of the prompt; `answer_tokens` is the most that will be generated, all choices."""

    tokens: int
    keys: Sequence[bytes] = ()
    answer_tokens: int = 0
    one_token: bool = False


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """`prefill` None: `decode` does all of it (colocated). `price` is the compute charged to the prefilling engine."""

    decode: str
    prefill: str | None
    cached_tokens: int
    price: float
    reason: str

    @property
    def kind(self) -> Kind:
        return "colocated" if self.prefill is None else "disaggregated"


class PrefixMap:
    """Which engines recently served a block, by key. Bounded, least recently used first; a hint, never a promise."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, engine_id: str, keys: Sequence[bytes]) -> None:
        # Children first, so that forgetting the oldest cuts chains at their ends.
        for key in reversed(keys):
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if engine_id in holders else (*holders, engine_id)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def longest(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Leading blocks of `keys` that each engine served; engines with none are absent."""
        runs: dict[str, int] = {}
        for depth, key in enumerate(keys):
            grown = False
            for engine_id in self._holders.get(key, ()):
                if runs.get(engine_id, 0) == depth:
                    runs[engine_id] = depth + 1
                    grown = True
            if not grown:
                break
        return runs

    def forget(self, engine_id: str) -> None:
        """The engine's blocks are gone."""
        for key, holders in list(self._holders.items()):
            if engine_id in holders:
                left = tuple(name for name in holders if name != engine_id)
                if left:
                    self._holders[key] = left
                else:
                    del self._holders[key]


def choose(
    views: Collection[EngineView],
    prompt: Prompt,
    runs: dict[str, int],
    settings: RoutingSettings,
    avoid: Collection[str] = (),
) -> Route | None:
    """The cheapest way to serve `prompt`; None if no engine can.

    `runs`: cached leading blocks per engine. Engines in `avoid` (they just failed) serve only when no other can.
    """
    decoders = _preferred([view for view in views if view.role != "prefill"], avoid)
    prefills = _preferred([view for view in views if view.role == "prefill"], avoid)
    if not decoders and not prefills:
        return None
    cost = _Cost(prompt, runs, settings)
    if not decoders:
        # Any engine can run a whole request; slower answers are better than none.
        return cost.colocated(min(prefills, key=cost.prefill), "no decode engine is alive")
    decode = min(decoders, key=cost.decode)
    both = [view for view in decoders if view.role == "both"]
    if decode.role == "both":
        return cost.colocated(min(both, key=cost.whole), "role both")
    if not prefills:
        return cost.colocated(decode, "no prefill engine is alive")
    if prompt.one_token:
        return cost.colocated(min(prefills, key=cost.prefill), "one token: prefill is the whole answer")
    if cost.missing(decode) <= settings.local_tokens:
        return cost.colocated(decode, f"only {cost.missing(decode)} tokens to compute")
    prefill = min(prefills, key=cost.prefill)
    cached = cost.cached(prefill)
    best = max((cost.cached(view) for view in prefills), default=0)
    why = f"{cached} of {prompt.tokens} tokens cached" if cached == best else f"backlog outweighs {best} cached tokens"
    return Route(
        decode=decode.engine_id,
        prefill=prefill.engine_id,
        cached_tokens=cached,
        price=cost.compute(prefill),
        reason=why,
    )


def _preferred(views: list[EngineView], avoid: Collection[str]) -> list[EngineView]:
    return [view for view in views if view.engine_id not in avoid] or views


class _Cost:
    def __init__(self, prompt: Prompt, runs: dict[str, int], settings: RoutingSettings) -> None:
        self._prompt = prompt
        self._settings = settings
        self._runs = runs
        # The last token is always computed: its logits are the first answer.
        self._most = max(0, prompt.tokens - 1)
        self._anywhere = self._tokens(max(runs.values(), default=0))

    def _tokens(self, blocks: int) -> int:
        return min(blocks * self._settings.block_tokens, self._most)

    def cached(self, view: EngineView) -> int:
        return self._tokens(self._runs.get(view.engine_id, 0))

    def missing(self, view: EngineView) -> int:
        return self._prompt.tokens - self.cached(view)

    def compute(self, view: EngineView) -> float:
        """Fetch what others hold beyond this engine's prefix, compute the rest."""
        here = self.cached(view)
        start = max(here, self._anywhere)
        end = self._prompt.tokens
        attention = (end * end - start * start) / (2 * self._settings.cost_context)
        return (start - here) * self._settings.fetch_cost + (end - start) + attention

    def prefill(self, view: EngineView) -> tuple[float, str]:
        return view.backlog + self.compute(view), view.engine_id

    def decode(self, view: EngineView) -> tuple[bool, float, str]:
        needed = self.missing(view) + self._prompt.answer_tokens
        pushed = self.missing(view) * self._settings.push_cost
        load = view.requests * self._settings.sequence_cost + view.backlog
        return view.free_tokens < needed and view.requests > 0, pushed + load, view.engine_id

    def whole(self, view: EngineView) -> tuple[bool, float, str]:
        full, load, name = self.decode(view)
        return full, load + self.compute(view), name

    def colocated(self, view: EngineView, reason: str) -> Route:
        return Route(
            decode=view.engine_id,
            prefill=None,
            cached_tokens=self.cached(view),
            price=self.compute(view),
            reason=reason,
        )
