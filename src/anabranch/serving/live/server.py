"""The gateway process: a socket, an event loop, signals.

**Covers** putting the gateway together, listening, and shutting down: on SIGTERM or SIGINT readiness turns
red, new requests get 503, running ones may finish within `drain_timeout_s`; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anabranch.blocks.key import Identity
from anabranch.core.errors import ConfigError, ModelFileError
from anabranch.engine.runner import ModelInfo
from anabranch.serving.config import GatewayConfig
from anabranch.serving.live.access import Tenants, load_keys, load_secret
from anabranch.serving.live.app import create_app
from anabranch.serving.live.exchange import HANG_UP
from anabranch.serving.live.gateway import Gateway, Senses, ServedModel
from anabranch.serving.live.tokenizer import NumberedTokenizer, PreparedTokenizer, Tokenizer
from anabranch.serving.openai import SamplingDefaults

BACKLOG = 1024


def run_gateway(
    config: GatewayConfig,
    info: ModelInfo,
    *,
    engines: Sequence[str],
    secret_dir: Path,
    prepared: str = "",
    served_name: str = "",
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Call from the main thread.

    `engines`: their addresses. `secret_dir`: where the tenant secret lives (keep it as long as the SSD tier).
    `prepared`: the model directory with the tokenizer; "": the stand-in tokenizer (tripwire, paced).
    `on_ready` gets the base URL once the port is open. Raises ConfigError (host without keys, port in use, keys file)
    and ModelFileError before serving.
    """
    tenants = Tenants(load_keys(config), load_secret(secret_dir))
    gateway = Gateway(config, served_model(info, prepared, served_name), engines, tenants, system_senses())
    listener = listen(config.host, config.port)
    server = GatewayServer(gateway)
    if on_ready is not None:
        on_ready(url_of(listener))
    server.serve_on(listener)


def served_model(info: ModelInfo, prepared: str = "", served_name: str = "") -> ServedModel:
    """Raises ModelFileError."""
    tokenizer: Tokenizer
    tokenizer = PreparedTokenizer(Path(prepared), datetime.now) if prepared else NumberedTokenizer(info.vocab)
    root = Identity(weights_digest=info.digest, layout=info.layout).root()
    return ServedModel(
        name=served_name or info.name,
        info=info,
        root=root,
        tokenizer=tokenizer,
        created=int(time.time()),
        defaults=sampling_defaults(prepared),
    )


def sampling_defaults(prepared: str) -> SamplingDefaults:
    """What the prepared model recommends. Raises ModelFileError if that cannot be understood."""
    path = Path(prepared) / "generation_config.json"
    if not prepared or not path.is_file():
        return SamplingDefaults()
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        return msgspec.convert({key: value for key, value in fields.items() if value is not None}, SamplingDefaults)
    except msgspec.MsgspecError as error:
        raise ModelFileError(f"cannot use {path}: {error}; correct the model's file and prepare it again") from error


def system_senses() -> Senses:
    return Senses(clock=time.monotonic, unix_time=time.time, random_bytes=os.urandom)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one. Raises ConfigError with the remedy."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"gateway.host = {host!r} cannot be used: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"gateway.port = {port}: cannot listen on {host}:{port} ({error.strerror}); choose another port, or stop"
            " what uses it"
        ) from error
    return sock


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Connection(HttpToolsProtocol):
    """Lets an answer drop its connection; to close one waits until the client has read what is on its way."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][HANG_UP] = self.transport.abort


class GatewayServer(uvicorn.Server):
    """uvicorn, but a first signal drains before the listener closes."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(gateway),
                http=Connection,
                loop="asyncio",
                lifespan="on",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=5,
            )
        )
        self._gateway = gateway
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None

    def serve_on(self, listener: socket.socket) -> None:
        """Blocks until stopped. Signals are handled only on the main thread; elsewhere use `stop`."""
        asyncio.run(self._serve_until_stopped(listener))

    def stop(self) -> None:
        """Begin to drain, or end at once if that has begun. Thread-safe."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                self._loop.call_soon_threadsafe(self._stop)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    async def _serve_until_stopped(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for sign in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(sign, self._stop)
        try:
            await self.serve(sockets=[listener])
        finally:
            listener.close()
            if self._draining is not None:
                self._draining.cancel()

    def _stop(self) -> None:
        if self._draining is not None:
            self.should_exit = True
            self._gateway.cancel_all()
            return
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._gateway.drain()
        self.should_exit = True
