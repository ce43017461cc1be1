"""The engine's thread: events in, actions out, one step after the other.

**Covers** driving `EngineCore` with a real clock, a runner and a port; which gateway owns which request.
**Does not cover** decisions (`engine.scheduler`) and connections (`engine.live.server`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from anabranch.core.errors import Unavailable
from anabranch.core.live.link import Link
from anabranch.core.messages import Message
from anabranch.engine.actions import Action, Send
from anabranch.engine.kv_port import KvPort, PortBack, PortLost
from anabranch.engine.live.inbox import Inbox, LinkClosed
from anabranch.engine.messages import (
    Cancel,
    Drain,
    EngineLoad,
    Failed,
    Prefill,
    Prefilled,
    Prepare,
    Prepared,
    StepOutput,
    Submit,
    TokenEvent,
)
from anabranch.engine.runner import ModelRunner, Sampled
from anabranch.engine.scheduler import EngineCore
from anabranch.engine.step import Step

log = logging.getLogger(__name__)
LOAD_INTERVAL_S = 0.25
IDLE_WAIT_S = 1.0
PORT_LOST_LIMIT_S = 30.0


class StepGate:
    """The `LayerGate` of one step: waits for loads, sends computed layers on. `broken`: loads given up on."""

    def __init__(self, step: Step, inbox: Inbox, port: KvPort, clock: Callable[[], float], timeout_s: float) -> None:
        self.broken: set[int] = set()
        self._step = step
        self._inbox = inbox
        self._port = port
        self._clock = clock
        self._until = clock() + timeout_s

    def wait(self, layer: int) -> None:
        for op in self._step.loads:
            if op not in self.broken and not self._inbox.wait_layer(op, layer, self._clock, self._until):
                self.broken.add(op)

    def done(self, layer: int) -> None:
        for push in self._step.pushes:
            action = push.at(layer)
            if action is not None:
                action.apply(self._port)


class EngineWorker:
    """Owns the core: nothing else calls it. `inbox.port_event` must be the port's sink.

    A runner that raises fails the requests of its step and nothing else. Two things end the thread: an error of the
    core or the port (a bug), and a node that stays away for `port_lost_limit_s` (a new process may attach where this
    one cannot, as to a new arena). Then `failure` holds the error and `on_death` is called: restart the process.
    """

    def __init__(
        self,
        core: EngineCore,
        runner: ModelRunner,
        port: KvPort,
        inbox: Inbox,
        *,
        on_death: Callable[[BaseException], None] = lambda error: None,
        port_lost_limit_s: float = PORT_LOST_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox = inbox
        self.failure: BaseException | None = None
        self._core = core
        self._runner = runner
        self._port = port
        self._on_death = on_death
        self._clock = clock
        self._owners: dict[str, Link] = {}
        self._load = core.load()
        self._load_at = 0.0
        self._port_lost_limit_s = port_lost_limit_s
        self._port_lost_at: float | None = None
        self._drain_until: float | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="engine-worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, drain_s: float = 0.0, join_s: float = 30.0) -> None:
        """Refuse new requests, let running ones finish for up to `drain_s`, cancel the rest, end the thread."""
        self._drain_until = self._clock() + drain_s
        self._stopping = True
        self.inbox.wake()
        if self._thread.is_alive():
            self._thread.join(drain_s + join_s)

    @property
    def load(self) -> EngineLoad:
        """The latest load view; safe from any thread."""
        return self._load

    def _main(self) -> None:
        try:
            while not self._stopped():
                self._turn()
        except BaseException as error:
            log.exception("engine worker failed")
            self.failure = error
            self._on_death(error)

    def _turn(self) -> None:
        core = self._core
        for link, event in self.inbox.drain():
            if isinstance(event, LinkClosed):
                self._cancel_all(link)
                continue
            if isinstance(event, Submit | Prepare | Prefill) and link is not None:
                self._owners[event.request.request_id] = link
            elif isinstance(event, PortLost):
                self._port_lost_at = self._clock()
            elif isinstance(event, PortBack):
                self._port_lost_at = None
            self._apply(core.handle(event, self._clock()))
        if self._port_lost_at is not None and self._clock() - self._port_lost_at > self._port_lost_limit_s:
            raise Unavailable(f"the node has been gone for {self._port_lost_limit_s:g} s; restart the engine")
        self._apply(core.expire(self._clock()))
        step = core.plan(self._clock())
        self._publish_load(going_idle=step is None)
        if step is not None:
            self._run(step)
        else:
            self.inbox.wait(min(IDLE_WAIT_S, max(0.0, core.next_wake() - self._clock())))

    def _run(self, step: Step) -> None:
        gate = StepGate(step, self.inbox, self._port, self._clock, self._core.config.load_timeout_s)
        try:
            for copy in step.copies:
                self._runner.copy_page(copy.src, copy.dst, copy.tokens)
            sampled: list[Sampled] = self._runner.run(step.chunks, gate)
        except Exception as error:
            log.exception("step %d failed", step.number)
            self._apply(self._core.abort(step, f"the model runner failed: {error}", self._clock()))
            return
        self._apply(self._core.finish(step, sampled, self._clock(), gate.broken))

    def _apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action.message)
            else:
                action.apply(self._port)

    # --- gateways ----------------------------------------------------------------------------------------------

    def _send(self, message: Message) -> None:
        match message:
            case StepOutput(tokens=tokens):
                for link, events in self._by_owner(tokens):
                    link.send(message if len(events) == len(tokens) else StepOutput(tokens=events))
            case Prepared(request_id=request_id) | Prefilled(request_id=request_id) | Failed(request_id=request_id):
                owner = self._owners.get(request_id)
                if owner is not None:
                    owner.send(message)
            case _:
                raise TypeError(f"an engine does not send {type(message).__name__}")

    def _by_owner(self, tokens: list[TokenEvent]) -> list[tuple[Link, list[TokenEvent]]]:
        groups: dict[int, tuple[Link, list[TokenEvent]]] = {}
        for event in tokens:
            link = self._owners.get(event.request_id)
            if link is not None:
                groups.setdefault(id(link), (link, []))[1].append(event)
        return list(groups.values())

    def _cancel_all(self, link: Link | None) -> None:
        for request_id in [name for name, owner in self._owners.items() if owner is link]:
            self._apply(self._core.handle(Cancel(request_id=request_id), self._clock()))
            del self._owners[request_id]

    def _publish_load(self, *, going_idle: bool) -> None:
        now = self._clock()
        if going_idle or now - self._load_at >= LOAD_INTERVAL_S:
            self._load = self._core.load()
            self._load_at = now
            for request_id in [name for name in self._owners if not self._core.has(name)]:
                del self._owners[request_id]

    # --- the end -----------------------------------------------------------------------------------------------

    def _stopped(self) -> bool:
        """Drain, then cancel what is left, then wait a moment for transfers to let go of their pages."""
        if not self._stopping or self._drain_until is None:
            return False
        if self._core.idle:
            return True
        self._apply(self._core.handle(Drain(), self._clock()))
        if self._clock() < self._drain_until:
            return False
        for request_id in self._core.requests():
            self._apply(self._core.handle(Cancel(request_id=request_id), self._clock()))
        return self._core.idle or self._clock() > self._drain_until + IDLE_WAIT_S
