"""Engine processes' insides in one process: worker, server and links over UNIX sockets, on an in-process node."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.core.errors import Unavailable
from anabranch.core.live.link import Link, connect
from anabranch.core.messages import Message
from anabranch.engine.config import EngineConfig
from anabranch.engine.live.inbox import Inbox
from anabranch.engine.live.server import Engine
from anabranch.engine.live.worker import EngineWorker
from anabranch.engine.messages import (
    Cancel,
    Drain,
    EngineHello,
    EngineLoad,
    EngineToGateway,
    Failed,
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
from anabranch.engine.paced import Pace, PacedRunner
from anabranch.engine.request import EngineRequest, SamplingParams
from anabranch.engine.runner import Chunk, LayerGate, ModelRunner, Sampled
from anabranch.engine.scheduler import EngineCore
from anabranch.engine.tripwire import TripwireRunner, tripwire_answer, tripwire_info
from anabranch.testing.fakes import Fabric, LocalPort

INFO = tripwire_info(layers=2, block_tokens=8, context_tokens=512)
DEADLINE_S = 30.0


class Client:
    """A gateway's end of a link; `until` waits for a condition on what has been received."""

    def __init__(self, address: str) -> None:
        self.received: list[Any] = []
        self.closed = ""
        self._changed = threading.Condition()
        self.link = Link(connect(address), EngineToGateway, self._on_message, self._on_close, name="test-gateway")
        self.link.start()

    def _on_message(self, link: Link, message: Any) -> None:
        with self._changed:
            self.received.append(message)
            self._changed.notify_all()

    def _on_close(self, link: Link, reason: str) -> None:
        with self._changed:
            self.closed = reason or "closed"
            self._changed.notify_all()

    def send(self, message: Message) -> None:
        assert self.link.send(message)

    def wait(self, kind: type[Any]) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: any(isinstance(m, kind) for m in self.received), DEADLINE_S)
            return next(m for m in self.received if isinstance(m, kind))

    def tokens(self, request_id: str) -> list[TokenEvent]:
        outputs = [m for m in self.received if isinstance(m, StepOutput)]
        return [event for output in outputs for event in output.tokens if event.request_id == request_id]

    def answer(self, request_id: str, n: int = 1) -> list[tuple[list[int], str]]:
        """Wait until all n choices have ended."""

        def done() -> bool:
            return sum(event.finish is not None for event in self.tokens(request_id)) == n

        with self._changed:
            assert self._changed.wait_for(done, DEADLINE_S), self.received[-5:]
            events = self.tokens(request_id)
        return [
            (
                [event.token for event in events if event.index == choice],
                next(event.finish or "" for event in events if event.index == choice and event.finish),
            )
            for choice in range(n)
        ]

    def close(self) -> None:
        self.link.close()
        self.link.join()


class StalledRunner:
    """Blocks in its first step until released: a long step."""

    needs_history = True

    def __init__(self, inner: ModelRunner) -> None:
        self.info = inner.info
        self.inner = inner
        self.entered = threading.Event()
        self.release = threading.Event()

    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        self.entered.set()
        assert self.release.wait(DEADLINE_S)
        return self.inner.run(batch, gate)

    def copy_page(self, src: int, dst: int, tokens: int) -> None:
        self.inner.copy_page(src, dst, tokens)

    def close(self) -> None:
        self.inner.close()


class BrokenRunner(StalledRunner):
    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        if any(chunk.tokens[0] == 13 for chunk in batch):
            raise RuntimeError("no luck")
        return self.inner.run(batch, gate)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fabric = Fabric()
        self.engines: dict[str, Engine] = {}
        self.clients: list[Client] = []

    def engine(self, name: str, wrap: Any = None, slots: int = 96) -> Engine:
        def runner(memory: memoryview) -> ModelRunner:
            inner = TripwireRunner(INFO, memory)
            return wrap(inner) if wrap is not None else inner  # type: ignore[no-any-return]

        engine = self.engines[name] = Engine(
            engine_id=name,
            role="both",
            address=f"unix:{self.folder}/{name}.sock",
            config=EngineConfig(block_tokens=8, step_tokens=64),
            info=INFO,
            identity=b"i" * 32,
            port_factory=lambda sink: LocalPort(self.fabric, name, INFO.layout, slots, sink, eager=True),
            runner_factory=runner,
        )
        return engine

    def client(self, name: str) -> Client:
        client = Client(self.engines[name].server.address)
        self.clients.append(client)
        return client


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    before = threading.active_count()
    yield rig
    for client in rig.clients:
        client.close()
    for engine in rig.engines.values():
        engine.close()
        assert engine.worker.failure is None
        assert not any(engine.core.census().values())
    assert threading.active_count() <= before


def request(name: str, tokens: list[int], **sampling: Any) -> EngineRequest:
    params = SamplingParams(**{"max_tokens": 12, **sampling})
    return EngineRequest(request_id=name, tokens=tokens, sampling=params, root=b"r" * 32, hash_key=b"k" * 32)


def oracle(question: EngineRequest) -> list[tuple[list[int], str]]:
    return [*tripwire_answer(INFO, question.tokens, question.sampling, n=question.n)]


def test_hello_comes_first_and_answers_are_right(rig: Rig) -> None:
    rig.engine("both")
    client = rig.client("both")
    questions = [request(f"q{i}", [*range(40 + i), 7]) for i in range(8)]
    for question in questions:
        client.send(Submit(request=question))
    for question in questions:
        assert client.answer(question.request_id) == oracle(question)
    hello = client.received[0]
    assert isinstance(hello, EngineHello)
    assert (hello.engine_id, hello.role, hello.block_tokens, hello.context_tokens) == ("both", "both", 8, 512)
    client.send(Ping())
    assert client.wait(EngineLoad).total_slots == 96


def test_prefill_and_decode_over_links(rig: Rig) -> None:
    rig.engine("p")
    rig.engine("d", lambda inner: PacedRunner(inner, Pace(base_s=1e-4, token_s=1e-6), clock=_zero, sleep=_no_sleep))
    prefill, decode = rig.client("p"), rig.client("d")
    question = request("q", list(range(61)), seed=3)
    decode.send(Prepare(request=question))
    ticket = decode.wait(Prepared).ticket
    prefill.send(Prefill(request=question, ticket=ticket))
    first = prefill.wait(Prefilled)
    assert first.usage.computed == 61
    decode.send(Start(request_id="q", first=[event.token for event in first.first]))
    tokens, reason = decode.answer("q")[0]
    assert ([first.first[0].token, *tokens], reason) == oracle(question)[0]


def test_a_closed_link_cancels_its_requests_and_no_others(rig: Rig) -> None:
    stalled: list[StalledRunner] = []

    def wrap(inner: ModelRunner) -> ModelRunner:
        stalled.append(StalledRunner(inner))
        return stalled[0]

    engine = rig.engine("both", wrap)
    gone, stays = rig.client("both"), rig.client("both")
    gone.send(Submit(request=request("gone", list(range(30)), max_tokens=400)))
    assert stalled[0].entered.wait(DEADLINE_S)
    question = request("stays", list(range(50)))
    stays.send(Submit(request=question))
    stays.send(Ping())
    stays.wait(EngineLoad)
    gone.close()
    give_up = time.monotonic() + DEADLINE_S
    while engine.server.gateways > 1:
        assert time.monotonic() < give_up
        stays.send(Ping())
        stays.wait(EngineLoad)
    stalled[0].release.set()
    assert stays.answer("stays") == oracle(question)
    assert not engine.core.has("gone")


def test_a_runner_that_fails_fails_its_step_only(rig: Rig) -> None:
    rig.engine("both", BrokenRunner)
    client = rig.client("both")
    client.send(Submit(request=request("bad", [13] * 20)))
    failed = client.wait(Failed)
    assert (failed.request_id, failed.retryable) == ("bad", True)
    assert "no luck" in failed.message
    question = request("good", [1, 2, 3])
    client.send(Submit(request=question))
    assert client.answer("good") == oracle(question)


def test_drain_refuses_new_requests_and_cancel_is_silent(rig: Rig) -> None:
    rig.engine("both")
    client = rig.client("both")
    client.send(Cancel(request_id="nobody"))
    client.send(Drain())
    client.send(Submit(request=request("late", [1, 2, 3])))
    failed = client.wait(Failed)
    assert (failed.code, failed.retryable) == ("unavailable", True)


def test_stopping_lets_running_requests_finish_within_the_drain(rig: Rig) -> None:
    engine = rig.engine("both")
    client = rig.client("both")
    question = request("q", list(range(30)), max_tokens=300)
    client.send(Submit(request=question))
    client.wait(StepOutput)
    engine.worker.stop(drain_s=DEADLINE_S)
    assert client.answer("q") == oracle(question)


def test_stopping_without_a_drain_cancels(rig: Rig) -> None:
    stalled: list[StalledRunner] = []

    def wrap(inner: ModelRunner) -> ModelRunner:
        stalled.append(StalledRunner(inner))
        return stalled[0]

    engine = rig.engine("both", wrap)
    client = rig.client("both")
    client.send(Submit(request=request("q", list(range(30)), max_tokens=400)))
    assert stalled[0].entered.wait(DEADLINE_S)
    stalled[0].release.set()
    engine.worker.stop()
    assert engine.core.idle


def test_a_node_that_stays_away_ends_the_engine() -> None:
    fabric, inbox, died = Fabric(), Inbox(), threading.Event()
    port = LocalPort(fabric, "n", INFO.layout, 16, inbox.port_event, eager=True)
    core = EngineCore("e", INFO, EngineConfig(block_tokens=8), total_slots=16, needs_history=True)
    worker = EngineWorker(
        core,
        TripwireRunner(INFO, port.memory),
        port,
        inbox,
        on_death=lambda error: died.set(),
        port_lost_limit_s=0.01,
    )
    worker.start()
    port.lose()
    assert died.wait(DEADLINE_S)
    assert isinstance(worker.failure, Unavailable)
    worker.stop()


def _zero() -> float:
    return 0.0


def _no_sleep(seconds: float) -> None:
    assert seconds >= 0
