"""Drives request lifecycles: events from engines and clocks in, messages to engines and tokens to clients out.

**Covers** who is connected, which request each message belongs to, deadlines. **Does not cover** HTTP or text
(`live.gateway`) or any decision (`serving.lifecycle`). Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from anabranch.blocks.hashing import PrefixChain
from anabranch.core.errors import AnabranchError, Unavailable
from anabranch.engine.messages import (
    EngineHello,
    EngineLoad,
    EngineToGateway,
    Failed,
    Prefilled,
    Prepared,
    StepOutput,
    TokenEvent,
)
from anabranch.engine.request import EngineRequest, Usage
from anabranch.policy.admission import Admission
from anabranch.policy.routing import Route
from anabranch.serving.actions import Action, Computed, Deliver, Ended, Routed, Send, Waits
from anabranch.serving.fleet import Fleet
from anabranch.serving.lifecycle import RequestLifecycle
from anabranch.serving.live.engine_client import EngineClient

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where one prompt's answer goes. Called on the event loop; must return at once."""

    def tokens(self, call: Call, events: list[TokenEvent]) -> None: ...

    def ended(self, call: Call, error: AnabranchError | None) -> None: ...


class Observer(Protocol):
    """What metrics want to know."""

    def routed(self, route: Route, attempt: int) -> None: ...

    def computed(self, usage: Usage, prompt_tokens: int) -> None: ...


class Call:
    """One prompt under way. `usage` is None until an engine reported it."""

    def __init__(self, request: EngineRequest, lifecycle: RequestLifecycle, sink: Sink) -> None:
        self.request = request
        self.lifecycle = lifecycle
        self.sink = sink
        self.usage: Usage | None = None
        self.waiting = True
        self.timer: asyncio.TimerHandle | None = None


class Dispatcher:
    def __init__(
        self,
        addresses: Sequence[str],
        fleet: Fleet,
        admission: Admission,
        observer: Observer,
        *,
        accept: Callable[[EngineHello], str],
        clock: Callable[[], float],
        retries: int,
        waits: Waits,
    ) -> None:
        self.fleet = fleet
        self.admission = admission
        self.clients = [EngineClient(address, self) for address in addresses]
        self.calls: dict[str, Call] = {}
        self._observer = observer
        self._accept = accept
        self._clock = clock
        self._retries = retries
        self._waits = waits
        self._by_engine: dict[str, EngineClient] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        for client in self.clients:
            client.start()

    async def close(self) -> None:
        self.cancel_all(Unavailable("the gateway shuts down"))
        await asyncio.gather(*(client.close() for client in self.clients))

    # --- calls --------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, chain: PrefixChain | None, sink: Sink) -> Call:
        """Start a prompt that `admission` has admitted. Everything else comes through the sink."""
        now = self._clock()
        lifecycle = RequestLifecycle(request, chain, self.fleet, now=now, retries=self._retries, waits=self._waits)
        call = Call(request, lifecycle, sink)
        self.calls[request.request_id] = call
        self._idle.clear()
        self._do(call, lifecycle.start(now))
        self._arm(call)
        return call

    def cancel(self, call: Call, error: AnabranchError | None = None) -> None:
        """Idempotent. Without an error the sink hears `ended(None)`."""
        self._do(call, call.lifecycle.cancel(error))

    def close_choice(self, call: Call, index: int) -> None:
        self._do(call, call.lifecycle.close_choice(index))

    def cancel_all(self, error: AnabranchError) -> None:
        for call in list(self.calls.values()):
            self.cancel(call, error)

    async def idle(self) -> None:
        """Until no prompt is under way."""
        await self._idle.wait()

    # --- engines ------------------------------------------------------------------------------------------------

    def engine_connected(self, client: EngineClient, hello: EngineHello) -> str:
        refusal = self._accept(hello)
        if not refusal and hello.engine_id in self._by_engine:
            refusal = f"another engine is connected under the name {hello.engine_id}; give each its own"
        if refusal:
            return refusal
        self._by_engine[hello.engine_id] = client
        self.fleet.connected(hello)
        now = self._clock()
        for call in list(self.calls.values()):
            if call.lifecycle.phase == "waiting":
                self._do(call, call.lifecycle.start(now))
        return ""

    def engine_lost(self, client: EngineClient, reason: str) -> None:
        engine_id = client.engine_id
        self._by_engine.pop(engine_id, None)
        self.fleet.lost(engine_id)
        now = self._clock()
        for call in list(self.calls.values()):
            self._do(call, call.lifecycle.engine_lost(engine_id, now))
            self._arm(call)

    def engine_message(self, client: EngineClient, message: EngineToGateway) -> None:
        match message:
            case StepOutput():
                self._step(client.engine_id, message)
            case EngineLoad():
                self.fleet.loaded(client.engine_id, message)
            case Prepared() | Prefilled() | Failed():
                call = self.calls.get(message.request_id.rpartition("/")[0])
                if call is not None:
                    self._do(call, call.lifecycle.message(client.engine_id, message, self._clock()))
                    self._arm(call)

    def _step(self, engine_id: str, step: StepOutput) -> None:
        now = self._clock()
        grouped: dict[str, list[TokenEvent]] = defaultdict(list)
        for event in step.tokens:
            grouped[event.request_id].append(event)
        for request_id, events in grouped.items():
            call = self.calls.get(request_id.rpartition("/")[0])
            if call is not None:
                self._do(call, call.lifecycle.tokens(engine_id, events, now))
                if call.lifecycle.phase != "running":
                    self._arm(call)

    # --- acting -------------------------------------------------------------------------------------------------

    def _do(self, call: Call, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver():
                    self._stop_waiting(call, started=True)
                    call.sink.tokens(call, action.events)
                case Send():
                    client = self._by_engine.get(action.engine_id)
                    if client is not None:
                        client.send(action.message)
                case Computed():
                    call.usage = action.usage
                    self._observer.computed(action.usage, len(call.request.tokens))
                case Routed():
                    self._observer.routed(action.route, action.attempt)
                    log.debug("%s: %s", call.lifecycle.attempt_id, action.route)
                case Ended():
                    self._end(call, action.error)

    def _end(self, call: Call, error: AnabranchError | None) -> None:
        self._stop_waiting(call, started=False)
        if call.timer is not None:
            call.timer.cancel()
        self.calls.pop(call.request.request_id, None)
        if not self.calls:
            self._idle.set()
        call.sink.ended(call, error)

    def _stop_waiting(self, call: Call, *, started: bool) -> None:
        if call.waiting:
            call.waiting = False
            self.admission.leave(self._clock(), started=started)

    def _arm(self, call: Call) -> None:
        """One timer per call, re-armed when it fires early or when a deadline may have come closer."""
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        if call.lifecycle.phase != "ended":
            delay = max(0.0, call.lifecycle.deadline - self._clock())
            call.timer = asyncio.get_running_loop().call_later(delay, self._tick, call)

    def _tick(self, call: Call) -> None:
        self._do(call, call.lifecycle.tick(self._clock()))
        self._arm(call)
