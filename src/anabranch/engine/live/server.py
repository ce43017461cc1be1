"""An engine as a process: accepts gateways, says who it is, reports its load.

**Covers** connections and the process's life. **Does not cover** where the runner and the port come from: `run_engine`
is given factories, because engines know neither nodes nor clusters.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import Unavailable
from anabranch.core.live.link import Link, Listener
from anabranch.engine.config import EngineConfig, Role
from anabranch.engine.kv_port import KvPort, PortEvent
from anabranch.engine.live.inbox import Inbox, LinkClosed
from anabranch.engine.live.worker import EngineWorker
from anabranch.engine.messages import EngineHello, GatewayToEngine, Ping
from anabranch.engine.runner import ModelInfo, ModelRunner
from anabranch.engine.scheduler import EngineCore

log = logging.getLogger(__name__)
LOAD_PERIOD_S = 1.0

RunnerFactory = Callable[[memoryview], ModelRunner]
PortFactory = Callable[[Callable[[PortEvent], None]], KvPort]


class EngineServer:
    """Listens at `address`; one duplex link per gateway. The worker must be running."""

    def __init__(self, address: str, hello: EngineHello, worker: EngineWorker) -> None:
        self._hello = hello
        self._worker = worker
        self._links: set[Link] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._listener = Listener(address, self._on_socket, name="engine")
        self._reporter = threading.Thread(target=self._report, name="engine-load", daemon=True)
        self._reporter.start()

    @property
    def address(self) -> str:
        return self._listener.address

    @property
    def gateways(self) -> int:
        """How many are connected; the requests of one that has gone are cancelled before the next step."""
        return len(self._links)

    def close(self) -> None:
        self._closing.set()
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close("engine stopped")
        for link in links:
            link.join()
        self._reporter.join(2.0)

    def _on_socket(self, sock: socket.socket) -> None:
        link = Link(sock, GatewayToEngine, self._on_message, self._on_close, name="engine-gateway")
        with self._lock:
            self._links.add(link)
        link.send(self._hello)
        link.start()
        link.send(self._worker.load)

    def _on_message(self, link: Link, message: Any) -> None:
        if isinstance(message, Ping):
            link.send(self._worker.load)
        else:
            self._worker.inbox.post(link, message)

    def _on_close(self, link: Link, reason: str) -> None:
        log.info("gateway connection closed: %s", reason)
        self._worker.inbox.post(link, LinkClosed())
        with self._lock:
            self._links.discard(link)

    def _report(self) -> None:
        while not self._closing.wait(LOAD_PERIOD_S):
            with self._lock:
                links = list(self._links)
            for link in links:
                link.send(self._worker.load)


class Engine:
    """A running engine: port, runner, worker and server, in this process. `close` undoes it in order."""

    def __init__(
        self,
        *,
        engine_id: str,
        role: Role,
        address: str,
        config: EngineConfig,
        info: ModelInfo,
        identity: bytes,
        port_factory: PortFactory,
        runner_factory: RunnerFactory,
        served_name: str = "",
        on_death: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        inbox = Inbox()
        self.port = port_factory(inbox.port_event)
        self.runner = runner_factory(self.port.memory)
        self.core = EngineCore(
            engine_id,
            info,
            config,
            total_slots=self.port.total_slots,
            nonce=secrets.token_hex(4),
            needs_history=bool(getattr(self.runner, "needs_history", False)),
        )
        self.worker = EngineWorker(self.core, self.runner, self.port, inbox, on_death=on_death)
        hello = EngineHello(
            engine_id=engine_id,
            role=role,
            model=served_name or info.name,
            identity=identity,
            context_tokens=min(info.context_tokens, self.port.total_slots * info.layout.block_tokens),
            block_tokens=info.layout.block_tokens,
            pid=os.getpid(),
        )
        self.worker.start()
        self.server = EngineServer(address, hello, self.worker)
        log.info("engine ready", extra={"engine": engine_id, "role": role, "slots": self.port.total_slots})

    def close(self, drain_s: float = 0.0) -> None:
        self.worker.stop(drain_s)
        self.server.close()
        self.runner.close()
        self.port.close()


def run_engine(
    *,
    engine_id: str,
    role: Role,
    address: str,
    config: EngineConfig,
    info: ModelInfo,
    identity: bytes,
    port_factory: PortFactory,
    runner_factory: RunnerFactory,
    served_name: str = "",
    drain_s: float = 5.0,
) -> None:
    """Run an engine until SIGTERM or SIGINT (drained for up to `drain_s`); call it from the main thread.

    `port_factory(sink)` connects to the node, `runner_factory(memory)` loads the model over the port's memory.
    Raises Unavailable when the engine's thread died: restart the process.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    engine = Engine(
        engine_id=engine_id,
        role=role,
        address=address,
        config=config,
        info=info,
        identity=identity,
        port_factory=port_factory,
        runner_factory=runner_factory,
        served_name=served_name,
        on_death=lambda error: stop.set(),
    )
    stop.wait()
    failure = engine.worker.failure
    engine.close(0.0 if failure is not None else drain_s)
    if failure is not None:
        raise Unavailable(f"the engine failed: {failure}") from failure
