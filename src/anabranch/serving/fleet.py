"""The engines as the gateway sees them: who is connected, how loaded each is, who holds which prefix."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from anabranch.engine.messages import EngineHello, EngineLoad
from anabranch.policy.routing import EngineView, PrefixMap, Prompt, Route, RoutingSettings, choose


class EngineState(msgspec.Struct, kw_only=True):
    """`claimed_*`: what this gateway has sent there and not yet seen done. Load reports lag by up to a second and do
    not know what is cached, so they only tell of work that came from elsewhere."""

    hello: EngineHello
    load: EngineLoad | None = None
    claimed_price: float = 0.0
    claimed_requests: int = 0


class Claim(msgspec.Struct, kw_only=True):
    """One request's share of an engine's load, until released."""

    engine_id: str
    state: EngineState
    price: float
    held: bool = True


class Fleet:
    """Connected engines. Views are taken afresh for every choice; nothing here does IO."""

    def __init__(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self.engines: dict[str, EngineState] = {}
        self.prefixes = PrefixMap(settings.remembered_keys)

    def connected(self, hello: EngineHello) -> None:
        self.engines[hello.engine_id] = EngineState(hello=hello)

    def lost(self, engine_id: str) -> None:
        # Its prefixes stay known: pages belong to the node, which may well have survived.
        self.engines.pop(engine_id, None)

    def loaded(self, engine_id: str, load: EngineLoad) -> None:
        if engine_id in self.engines:
            self.engines[engine_id].load = load

    def choose(self, prompt: Prompt, avoid: Collection[str] = ()) -> Route | None:
        """Engines in `avoid`, and those whose node is gone, serve only when no other can: without its node an engine
        cannot start anything, and looks empty."""
        nodeless = {name for name, state in self.engines.items() if state.load is not None and not state.load.store_ok}
        return choose(self.views(), prompt, self.prefixes.longest(prompt.keys), self.settings, nodeless.union(avoid))

    def claim(self, engine_id: str, price: float) -> Claim:
        state = self.engines[engine_id]
        state.claimed_price += price
        state.claimed_requests += 1
        return Claim(engine_id=engine_id, state=state, price=price)

    def computed(self, claim: Claim) -> None:
        """The prompt is done; what is left of the claim is one running sequence."""
        if claim.held:
            claim.state.claimed_price = max(0.0, claim.state.claimed_price - claim.price)
            claim.price = 0.0

    def release(self, claim: Claim) -> None:
        """Idempotent."""
        if claim.held:
            self.computed(claim)
            claim.state.claimed_requests -= 1
            claim.held = False

    def record(self, engine_ids: Collection[str], keys: Sequence[bytes]) -> None:
        for engine_id in engine_ids:
            self.prefixes.record(engine_id, keys)

    def views(self) -> list[EngineView]:
        """Engines that accept requests, in a fixed order."""
        views = []
        for engine_id, state in sorted(self.engines.items()):
            if state.load is not None and state.load.draining:
                continue
            views.append(self._view(engine_id, state))
        return views

    def can_decode(self) -> bool:
        return any(view.role != "prefill" for view in self.views())

    def _view(self, engine_id: str, state: EngineState) -> EngineView:
        backlog, requests, free_tokens = state.claimed_price, state.claimed_requests, 1 << 40
        if state.load is not None:
            there = state.load.waiting + state.load.running
            strangers = max(0, there - requests)
            backlog += state.load.waiting_tokens * strangers / max(1, there)
            requests += strangers
            free_tokens = max(0, state.load.free_slots * self.settings.block_tokens - state.load.waiting_tokens)
        return EngineView(
            engine_id=engine_id, role=state.hello.role, backlog=backlog, requests=requests, free_tokens=free_tokens
        )
