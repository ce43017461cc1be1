"""An engine without a model: it speaks `engine.messages` on a real socket, and misbehaves on command.

**Covers** every message a gateway exchanges with an engine, a prefix cache (of names only), and faults: failing,
hanging or disconnecting at a named step, going silent altogether. **Does not cover** K/V bytes or the hand-off itself.

The next token is a function of the tokens so far, the seed and the choice index (`fake_token`), and always a lower-case
letter, so answers are text under the stand-in tokenizer, and a test can compute them (`fake_answer`).
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.blocks.hashing import prefix_keys
from anabranch.core.live.link import Link, Listener
from anabranch.core.messages import Message
from anabranch.engine.messages import (
    Cancel,
    Drain,
    EngineHello,
    EngineLoad,
    Failed,
    GatewayToEngine,
    Ping,
    Prefill,
    Prefilled,
    Prepare,
    Prepared,
    Start,
    StepOutput,
    Submit,
    TokenEvent,
)
from anabranch.engine.request import EngineRequest, FinishReason, TokenLogprob, Usage
from anabranch.transfer.api import Address, Ticket

STEPS = ("submit", "prepare", "prefill", "start")
Fault = Callable[["FakeEngine", Link, Any], None]


def fake_token(tokens: Sequence[int], seed: int, index: int) -> int:
    """The token after `tokens`, a letter."""
    return 97 + (tokens[-1] * 31 + len(tokens) * 17 + seed % 1009 + index * 101) % 26


def fake_answer(request: EngineRequest, index: int = 0, count: int | None = None) -> list[int]:
    """What an undisturbed engine generates for one choice; `count` stops early."""
    tokens = list(request.tokens)
    answer: list[int] = []
    for _ in range(request.sampling.max_tokens if count is None else count):
        answer.append(fake_token(tokens, request.sampling.seed, index))
        tokens.append(answer[-1])
        if answer[-1] in request.sampling.stop_token_ids:
            break
    return answer


def fail(code: str = "unavailable", *, retryable: bool = True, retry_after_s: float = 1.0) -> Fault:
    """A fault: answer Failed."""

    def fault(engine: FakeEngine, link: Link, message: Any) -> None:
        request_id = message.request_id if isinstance(message, Start) else message.request.request_id
        engine._prepared.pop(request_id, None)
        link.send(
            Failed(
                request_id=request_id,
                code=code,
                message=f"told to fail ({code})",
                retryable=retryable,
                retry_after_s=retry_after_s,
            )
        )

    return fault


def hang(engine: FakeEngine, link: Link, message: Any) -> None:
    """A fault: never answer."""


def disconnect(engine: FakeEngine, link: Link, message: Any) -> None:
    """A fault: drop the connection."""
    link.close("told to disconnect")


class _Running:
    def __init__(
        self, link: Link, request: EngineRequest, first: Sequence[int] = (), usage: Usage | None = None
    ) -> None:
        self.link = link
        self.request = request
        self.usage = usage
        self.choices = {index: list(request.tokens) for index in range(request.n)}
        for index, token in enumerate(first):
            self.choices[index].append(token)
            if _finish(request, token, 1) is not None:
                del self.choices[index]

    def step(self) -> list[TokenEvent]:
        events = []
        request = self.request
        for index, tokens in list(self.choices.items()):
            token = fake_token(tokens, request.sampling.seed, index)
            tokens.append(token)
            finish = _finish(request, token, len(tokens) - len(request.tokens))
            events.append(_event(request, index, token, finish, self.usage))
            self.usage = None
            if finish is not None:
                del self.choices[index]
        return events


class FakeEngine:
    """Listens at once; `close` ends it. `step_s`: pause between steps. All of `received`, in order, is for assertions.

    `faults[step]`: what to do instead of the proper answer, once each, in order. `cut_after`: disconnect once, after
    this many tokens have been sent in all. `hold`: while set, no step runs.
    """

    def __init__(
        self,
        engine_id: str,
        role: str = "both",
        *,
        identity: bytes = b"tripwire-1",
        model: str = "tripwire",
        block_tokens: int = 16,
        context_tokens: int = 8192,
        address: str = "127.0.0.1:0",
        step_s: float = 0.0,
    ) -> None:
        self.hello = EngineHello(
            engine_id=engine_id,
            role=role,
            model=model,
            identity=identity,
            context_tokens=context_tokens,
            block_tokens=block_tokens,
            pid=0,
        )
        self.faults: dict[str, deque[Fault]] = {step: deque() for step in STEPS}
        self.received: list[Message] = []
        self.cut_after: int | None = None
        self.tokens_sent = 0
        self.draining = False
        self._hold = False
        self._silent = False
        self._step_s = step_s
        self._seen: set[bytes] = set()
        self._prepared: dict[str, tuple[Link, EngineRequest]] = {}
        self._running: dict[str, _Running] = {}
        self._links: set[Link] = set()
        self._changed = threading.Condition()
        self._closing = False
        self._listener = Listener(address, self._accept, name=engine_id)
        self._thread = threading.Thread(target=self._run, name=f"{engine_id}-steps", daemon=True)
        self._thread.start()

    # --- commands and questions ---------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        return self._listener.address

    def busy(self) -> int:
        """Requests prepared or running: 0 means that everything was freed."""
        with self._changed:
            return len(self._prepared) + len(self._running)

    def requests(self, kind: type[Message]) -> list[Any]:
        with self._changed:
            return [message for message in self.received if isinstance(message, kind)]

    def wait(self, what: Callable[[], bool], timeout_s: float = 20.0) -> bool:
        """Until `what()` holds; re-checked whenever something happens here."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while not what():
                if not self._changed.wait(min(0.1, max(0.0, end - time.monotonic()))) and time.monotonic() >= end:
                    return what()
        return True

    def hold(self, on: bool = True) -> None:
        """Stop generating; probes are still answered."""
        with self._changed:
            self._hold = on
            self._changed.notify_all()

    def silence(self, on: bool = True) -> None:
        """Like a stopped process: connections stay open, nothing is said."""
        with self._changed:
            self._silent = on
            self._changed.notify_all()

    def disconnect(self) -> None:
        for link in list(self._links):
            link.close("told to disconnect")

    def close(self) -> None:
        self._listener.close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(5.0)
        links = list(self._links)
        for link in links:
            link.close()
        for link in links:
            link.join()

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the wire -----------------------------------------------------------------------------------------------

    def _accept(self, sock: socket.socket) -> None:
        link = Link(sock, GatewayToEngine, self._received, self._closed, name=self.hello.engine_id)
        with self._changed:
            self._links.add(link)
        link.start()
        if not self._silent:
            link.send(self.hello)
            link.send(self._load())

    def _closed(self, link: Link, reason: str) -> None:
        with self._changed:
            self._links.discard(link)
            self._prepared = {name: entry for name, entry in self._prepared.items() if entry[0] is not link}
            self._running = {name: entry for name, entry in self._running.items() if entry.link is not link}
            self._changed.notify_all()

    def _received(self, link: Link, message: GatewayToEngine) -> None:
        with self._changed:
            if self._silent:
                return
            if not isinstance(message, Ping):
                self.received.append(message)
            self._answer(link, message)
            self._changed.notify_all()

    def _answer(self, link: Link, message: GatewayToEngine) -> None:
        step = type(message).__name__.lower()
        if faults := self.faults.get(step):
            faults.popleft()(self, link, message)
            return
        match message:
            case Submit(request=request):
                self._running[request.request_id] = _Running(link, request, usage=self._look_up(request))
            case Prepare(request=request):
                self._prepared[request.request_id] = (link, request)
                cached = self._look_up(request).cached
                link.send(Prepared(request_id=request.request_id, ticket=_ticket(request), cached=cached))
            case Prefill(request=request):
                first = [fake_token(request.tokens, request.sampling.seed, index) for index in range(request.n)]
                events = [_event(request, i, token, _finish(request, token, 1), None) for i, token in enumerate(first)]
                link.send(Prefilled(request_id=request.request_id, first=events, usage=self._look_up(request)))
            case Start(request_id=name) if name in self._prepared:
                _, request = self._prepared.pop(name)
                self._running[name] = _Running(link, request, first=message.first)
            case Cancel(request_id=name):
                self._prepared.pop(name, None)
                self._running.pop(name, None)
            case Ping():
                link.send(self._load())
            case Drain():
                self.draining = True
                link.send(self._load())

    # --- the engine ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing and (not self._running or self._hold or self._silent):
                    self._changed.wait()
                if self._closing:
                    return
                self._one_step()
                end = time.monotonic() + self._step_s
                while not self._closing and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)

    def _one_step(self) -> None:
        by_link: dict[Link, list[TokenEvent]] = {}
        for name, running in list(self._running.items()):
            by_link.setdefault(running.link, []).extend(running.step())
            if not running.choices:
                del self._running[name]
        for link, events in by_link.items():
            self.tokens_sent += len(events)
            link.send(StepOutput(tokens=events))
            if self.cut_after is not None and self.tokens_sent >= self.cut_after:
                self.cut_after = None
                link.close("cut")
        self._changed.notify_all()

    def _load(self) -> EngineLoad:
        return EngineLoad(
            waiting=0,
            running=len(self._running),
            waiting_tokens=0,
            free_slots=1 << 16,
            total_slots=1 << 16,
            steps=0,
            draining=self.draining,
        )

    def _look_up(self, request: EngineRequest) -> Usage:
        size = self.hello.block_tokens
        keys = prefix_keys(request.root, request.hash_key, size, request.tokens) if request.hash_key else []
        hits = sum(1 for _ in itertools.takewhile(self._seen.__contains__, keys))
        cached = min(hits * size, len(request.tokens) - 1)
        self._seen.update(keys)
        return Usage(prompt=len(request.tokens), computed=len(request.tokens) - cached, dram=cached)


def _finish(request: EngineRequest, token: int, generated: int) -> FinishReason | None:
    if token in request.sampling.stop_token_ids and generated > request.sampling.min_tokens:
        return "stop"
    return "length" if generated >= request.sampling.max_tokens else None


def _event(
    request: EngineRequest, index: int, token: int, finish: FinishReason | None, usage: Usage | None
) -> TokenEvent:
    logprob = None
    if request.sampling.logprobs is not None:
        top = [(token + rank, -0.25 - rank) for rank in range(request.sampling.logprobs)]
        logprob = TokenLogprob(-0.25, top)
    return TokenEvent(
        request_id=request.request_id, index=index, token=token, logprob=logprob, finish=finish, usage=usage
    )


def _ticket(request: EngineRequest) -> Ticket:
    return Ticket(
        handoff=request.request_id,
        secret=b"fake",
        address=Address("127.0.0.1", 1),
        first=0,
        blocks=1,
        layers=1,
        deadline_s=30.0,
    )
