"""A gateway with real sockets, in a thread of the test's own process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import httpx
import msgspec

from anabranch.core.errors import InvariantBroken
from anabranch.engine.runner import ModelInfo
from anabranch.engine.tripwire import tripwire_info
from anabranch.serving.actions import Waits
from anabranch.serving.config import GatewayConfig
from anabranch.serving.live.access import Tenants
from anabranch.serving.live.gateway import Gateway
from anabranch.serving.live.server import GatewayServer, listen, served_model, system_senses, url_of
from anabranch.testing.fake_engine import FakeEngine

SECRET = b"a secret of exactly 32 bytes ..."


class RunningGateway(msgspec.Struct, frozen=True):
    url: str
    gateway: Gateway
    server: GatewayServer
    thread: threading.Thread

    def stop(self) -> None:
        """As SIGTERM does."""
        self.server.stop()


@contextlib.contextmanager
def running_gateway(
    engines: Sequence[FakeEngine | str],
    *,
    config: GatewayConfig | None = None,
    keys: dict[str, str] | None = None,
    info: ModelInfo | None = None,
    waits: Waits | None = None,
    wait_ready: bool = True,
) -> Iterator[RunningGateway]:
    """Serves until the block ends, and then checks that its thread ended."""
    config = config or GatewayConfig(port=0)
    addresses = [engine if isinstance(engine, str) else engine.address for engine in engines]
    model = served_model(info or tripwire_info())
    gateway = Gateway(config, model, addresses, Tenants(keys or {}, SECRET), system_senses(), waits=waits)
    server = GatewayServer(gateway)
    listener = listen("127.0.0.1", 0)
    url = url_of(listener)
    thread = threading.Thread(target=server.serve_on, args=(listener,), name="gateway", daemon=True)
    thread.start()
    try:
        if wait_ready:
            wait_until(lambda: len(gateway.dispatcher.fleet.engines) == len(addresses), "engines did not connect")
            wait_until(lambda: httpx.get(f"{url}/health/live").status_code == 200, "the gateway did not answer")
        else:
            wait_until(lambda: server.started, "the gateway did not start")
        yield RunningGateway(url, gateway, server, thread)
    finally:
        gateway.config = msgspec.structs.replace(gateway.config, drain_timeout_s=0.0)
        server.stop()
        server.stop()
        thread.join(20.0)
        if thread.is_alive():
            raise InvariantBroken("the gateway did not stop")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll; raises InvariantBroken with `what` after the timeout."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise InvariantBroken(f"{what} within {timeout_s:g} s")
        time.sleep(0.01)
