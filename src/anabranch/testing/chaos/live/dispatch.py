"""The gateway's dispatcher as a client: asks go in, outcomes come out; no HTTP in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from anabranch.blocks.hashing import PrefixChain, tenant_hash_key
from anabranch.blocks.key import Identity
from anabranch.core.errors import AnabranchError
from anabranch.engine.messages import EngineHello, TokenEvent
from anabranch.engine.request import EngineRequest, Usage
from anabranch.engine.runner import ModelInfo
from anabranch.policy.admission import Admission
from anabranch.policy.routing import Route, RoutingSettings
from anabranch.serving.actions import Waits
from anabranch.serving.fleet import Fleet
from anabranch.serving.live.dispatcher import Call, Dispatcher
from anabranch.testing.chaos.judge import Outcome
from anabranch.testing.chaos.workload import Ask

SECRET = b"the secret of a fault campaign .."


class Tally:
    """The dispatcher's observer."""

    def __init__(self) -> None:
        self.attempts = 0
        self.retries = 0
        self.kinds: dict[str, int] = {}
        self.usage = Usage()
        self.uneven: list[Usage] = []

    def routed(self, route: Route, attempt: int) -> None:
        self.attempts += 1
        self.retries += attempt > 1
        self.kinds[route.kind] = self.kinds.get(route.kind, 0) + 1

    def computed(self, usage: Usage, prompt_tokens: int) -> None:
        if usage.computed + usage.cached != usage.prompt or min(usage.computed, usage.dram, usage.ssd, usage.peer) < 0:
            self.uneven.append(usage)
        old = self.usage
        self.usage = Usage(
            prompt=old.prompt + usage.prompt,
            computed=old.computed + usage.computed,
            dram=old.dram + usage.dram,
            ssd=old.ssd + usage.ssd,
            peer=old.peer + usage.peer,
        )


class DirectClient:
    """Runs on the event loop that `start` was called on. `deadline_s`: of asks whose fate is not a deadline."""

    def __init__(
        self, info: ModelInfo, addresses: Sequence[str], clock: Callable[[], float], *, deadline_s: float = 30.0
    ) -> None:
        self._deadline_s = deadline_s
        layout = info.layout
        self._info = info
        self._root = Identity(weights_digest=info.digest, layout=layout).root()
        self.tally = Tally()
        self._answers: dict[Call, _Answer] = {}
        # Every prompt that is not almost wholly cached goes through a hand-off: that is what is tested here.
        settings = RoutingSettings(block_tokens=layout.block_tokens, local_tokens=8)
        self.dispatcher = Dispatcher(
            addresses,
            Fleet(settings),
            Admission(4096),
            self.tally,
            accept=self._accept,
            clock=clock,
            retries=3,
            waits=Waits(engine_s=10.0, prepare_s=4.0, prefill_s=6.0, token_s=6.0),
        )

    async def start(self, engines: int) -> None:
        self.dispatcher.start()
        async with asyncio.timeout(20.0):
            while len(self.dispatcher.fleet.engines) < engines:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.dispatcher.close()

    def keys(self, tokens: Sequence[int], tenant: str) -> list[bytes]:
        return self._chain(tokens, tenant).keys

    async def put(self, ask: Ask) -> Outcome:
        """Ask, leave early if that is the ask's fate, and return what was seen."""
        call, over = self.begin(ask)
        answer = self._answers[call]
        if ask.fate == "leave":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ask.patience_s):
                    await answer.enough.wait()
            if not answer.over.done():
                answer.outcome.left = True
                self.dispatcher.cancel(call)
        return await asyncio.shield(over)

    def begin(self, ask: Ask) -> tuple[Call, asyncio.Future[Outcome]]:
        """Ask; the future is done when nothing follows."""
        request = EngineRequest(
            request_id=f"ask-{ask.number}",
            tokens=ask.tokens,
            sampling=ask.sampling,
            n=ask.n,
            root=self._root,
            hash_key=_hash_key(ask.tenant),
            tenant=ask.tenant,
            cacheable=ask.cacheable,
            deadline_s=ask.patience_s + 0.001 if ask.fate == "deadline" else self._deadline_s,
        )
        answer = _Answer(ask)
        self.dispatcher.admission.admit()
        chain = self._chain(ask.tokens, ask.tenant) if ask.cacheable else None
        call = self.dispatcher.submit(request, chain, answer)
        self._answers[call] = answer
        answer.over.add_done_callback(lambda _: self._answers.pop(call, None))
        return call, answer.over

    def _chain(self, tokens: Sequence[int], tenant: str) -> PrefixChain:
        chain = PrefixChain(self._root, _hash_key(tenant), self._info.layout.block_tokens)
        chain.extend(tokens)
        return chain

    def _accept(self, hello: EngineHello) -> str:
        return "" if hello.identity in (self._info.digest, self._root) else "another model"


class _Answer:
    """A dispatcher's sink."""

    def __init__(self, ask: Ask) -> None:
        self.outcome = Outcome.empty(ask)
        self.outcome.request_id = f"ask-{ask.number}"
        self.enough = asyncio.Event()
        self.over: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._patience = ask.patience_tokens

    def tokens(self, call: Call, events: list[TokenEvent]) -> None:
        for event in events:
            self.outcome.choices[event.index].append(event.token)
            if event.finish is not None:
                self.outcome.finishes[event.index] = event.finish
        if sum(map(len, self.outcome.choices)) >= self._patience:
            self.enough.set()

    def ended(self, call: Call, error: AnabranchError | None) -> None:
        if error is not None:
            self.outcome.error = error.code
            self.outcome.message = str(error)
        if call.usage is not None:
            self.outcome.prompt_tokens = call.usage.prompt
        self.enough.set()
        self.over.set_result(self.outcome)


def _hash_key(tenant: str) -> bytes:
    return tenant_hash_key(SECRET, tenant)
