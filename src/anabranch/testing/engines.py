"""Engines in one thread: the real scheduler, the tripwire runner and a `LocalPort`, driven turn by turn.

`LocalEngine` is the reference driver of `EngineCore`; `LocalGateway` sends requests the colocated or the disaggregated
way and collects what comes back. No clock and no threads: the caller passes the time and decides who runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from anabranch.core.messages import Message
from anabranch.engine.actions import Action, Send
from anabranch.engine.config import EngineConfig
from anabranch.engine.kv_port import Acquired, LayersReady, LoadEnded, PortEvent
from anabranch.engine.messages import Cancel, Failed, Prefill, Prefilled, Prepare, Prepared, Start, StepOutput, Submit
from anabranch.engine.request import EngineRequest, FinishReason, Usage
from anabranch.engine.runner import ModelInfo
from anabranch.engine.scheduler import EngineCore, GatewayEvent
from anabranch.engine.step import Step
from anabranch.engine.tripwire import TripwireRunner
from anabranch.testing.fakes import Fabric, LocalPort, PortFaults


class LocalEngine:
    """`send(message)` gets what the engine tells the gateway. Events wait in `inbox` until the next `turn`."""

    def __init__(
        self,
        fabric: Fabric,
        engine_id: str,
        info: ModelInfo,
        config: EngineConfig,
        slots: int,
        send: Callable[[Message], None],
        *,
        ssd_blocks: int = 0,
        faults: PortFaults | None = None,
    ) -> None:
        self.inbox: deque[GatewayEvent | PortEvent] = deque()
        self.steps: list[Step] = []
        self.now = 0.0
        self._fabric = fabric
        self._send = send
        self._layers: dict[int, int] = {}
        self.port = LocalPort(
            fabric, engine_id, info.layout, slots, self._on_event, ssd_blocks=ssd_blocks, faults=faults
        )
        self.runner = TripwireRunner(info, self.port.memory)
        self.core = EngineCore(engine_id, info, config, total_slots=slots, needs_history=True)

    def post(self, event: GatewayEvent | PortEvent) -> None:
        self.inbox.append(event)

    def turn(self, now: float) -> bool:
        """Handle what has come in and run at most one step; False when there was nothing to do."""
        self.now = now
        busy = bool(self.inbox)
        while self.inbox:
            self._apply(self.core.handle(self.inbox.popleft(), now))
        self._apply(self.core.expire(now))
        step = self.core.plan(now)
        if step is None:
            return busy
        self.steps.append(step)
        for copy in step.copies:
            self.runner.copy_page(copy.src, copy.dst, copy.tokens)
        gate = _PumpedGate(self._fabric, self.port, step, self._layers, self.core.info.layout.layers)
        sampled = self.runner.run(step.chunks, gate)
        self._apply(self.core.finish(step, sampled, now, gate.broken))
        return True

    def _apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action.message)
            else:
                action.apply(self.port)

    def _on_event(self, event: PortEvent) -> None:
        """Layers in place are known at once, so that a running step can wait for them."""
        match event:
            case Acquired() if event.loading:
                self._layers[event.op] = 0
            case LayersReady():
                self._layers[event.op] = event.layers
            case LoadEnded():
                self._layers.pop(event.op, None)
            case _:
                pass
        self.inbox.append(event)


class _PumpedGate:
    """Waits by pumping the fabric: nothing else could make a layer arrive."""

    def __init__(self, fabric: Fabric, port: LocalPort, step: Step, layers: dict[int, int], all_layers: int) -> None:
        self.broken: set[int] = set()
        self._fabric = fabric
        self._port = port
        self._step = step
        self._layers = layers
        self._all = all_layers

    def wait(self, layer: int) -> None:
        for op in self._step.loads:
            while self._layers.get(op, self._all) <= layer and op not in self.broken:
                if not self._fabric.pump(1):
                    self.broken.add(op)

    def done(self, layer: int) -> None:
        for push in self._step.pushes:
            action = push.at(layer)
            if action is not None:
                action.apply(self._port)


class Reply:
    """What a gateway knows about one request. `choices[i]`: its tokens and, in the end, its finish reason."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.tokens: list[list[int]] = [[] for _ in range(request.n)]
        self.finish: list[FinishReason | None] = [None] * request.n
        self.usage: Usage | None = None
        self.failed: Failed | None = None
        self.cancelled = False
        self.prefill: LocalEngine | None = None
        self.decode: LocalEngine | None = None

    @property
    def done(self) -> bool:
        return self.cancelled or self.failed is not None or all(reason is not None for reason in self.finish)


class LocalGateway:
    """Speaks `engine.messages` with engines in the same thread: `send` of an engine goes to `receive`."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}

    def submit(self, request: EngineRequest, engine: LocalEngine) -> Reply:
        reply = self.replies[request.request_id] = Reply(request)
        reply.decode = engine
        engine.post(Submit(request=request))
        return reply

    def disaggregate(self, request: EngineRequest, prefill: LocalEngine, decode: LocalEngine) -> Reply:
        reply = self.replies[request.request_id] = Reply(request)
        reply.prefill, reply.decode = prefill, decode
        decode.post(Prepare(request=request))
        return reply

    def cancel(self, request_id: str) -> None:
        reply = self.replies[request_id]
        reply.cancelled = True
        self._cancel_at(reply, (reply.prefill, reply.decode))

    def receive(self, message: Message) -> None:
        match message:
            case StepOutput(tokens=events):
                for event in events:
                    self._token(event.request_id, event.index, event.token, event.finish, event.usage)
            case Prepared(request_id=request_id, ticket=ticket):
                reply = self._live(request_id)
                if reply is not None and reply.prefill is not None:
                    reply.prefill.post(Prefill(request=reply.request, ticket=ticket))
            case Prefilled(request_id=request_id, first=first, usage=usage):
                reply = self._live(request_id)
                if reply is not None and reply.decode is not None:
                    reply.usage = usage
                    for event in first:
                        self._token(request_id, event.index, event.token, event.finish, None)
                    reply.decode.post(Start(request_id=request_id, first=[event.token for event in first]))
            case Failed(request_id=request_id):
                reply = self._live(request_id)
                if reply is not None:
                    reply.failed = message
                    self._cancel_at(reply, (reply.prefill, reply.decode))
            case _:
                raise TypeError(f"a gateway does not expect {type(message).__name__}")

    def _live(self, request_id: str) -> Reply | None:
        reply = self.replies[request_id]
        return None if reply.done else reply

    def _token(self, request_id: str, index: int, token: int, finish: FinishReason | None, usage: Usage | None) -> None:
        reply = self.replies[request_id]
        reply.tokens[index].append(token)
        reply.finish[index] = finish
        if usage is not None:
            reply.usage = usage

    def _cancel_at(self, reply: Reply, engines: Sequence[LocalEngine | None]) -> None:
        for engine in engines:
            if engine is not None:
                engine.post(Cancel(request_id=reply.request.request_id))


def run_until_idle(
    fabric: Fabric, engines: Sequence[LocalEngine], *, now: float = 0.0, tick_s: float = 0.001, turns: int = 100_000
) -> float:
    """Let everything happen until every engine is idle; returns the time reached. Raises RuntimeError, with what is
    left, when that takes more than `turns` rounds."""
    for _ in range(turns):
        busy = fabric.pump(8) > 0
        for engine in engines:
            busy = engine.turn(now) or busy
        now += tick_s
        if not busy and not fabric.pending:
            if all(engine.core.idle for engine in engines):
                return now
            now = max(now, min(engine.core.next_wake() for engine in engines if not engine.core.idle))
            if now == float("inf"):
                break
    raise RuntimeError(f"engines do not come to rest: {[engine.core.census() for engine in engines]}")
