"""The gateway's connection to one engine.

**Covers** connecting and reconnecting, framing, and noticing an engine that is silent (stopped, hung, unplugged).
**Does not cover** what the messages mean (`serving.lifecycle`). Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from anabranch.core.errors import WireError
from anabranch.core.live.link import parse_address
from anabranch.core.wire import FrameDecoder, encode
from anabranch.engine.messages import EngineHello, EngineLoad, EngineToGateway, GatewayToEngine, Ping

log = logging.getLogger(__name__)
PING_S = 0.4
SILENT_TICKS = 4
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 1.0
MAX_UNSENT_BYTES = 64 << 20


class EngineListener(Protocol):
    def engine_connected(self, client: EngineClient, hello: EngineHello) -> str:
        """ "" to accept, or why this engine is refused."""

    def engine_message(self, client: EngineClient, message: EngineToGateway) -> None: ...

    def engine_lost(self, client: EngineClient, reason: str) -> None:
        """Once for each accepted connection."""


class EngineClient:
    """Keeps one connection to `address` (`unix:/path` or `host:port`) alive until `close`.

    An engine that says nothing during SILENT_TICKS pings in a row is lost; counting ticks, not seconds, keeps a gateway
    that was itself too busy to read from blaming its engines.
    """

    def __init__(self, address: str, listener: EngineListener) -> None:
        self.address = address
        self.engine_id = ""
        self._listener = listener
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self.trouble = "not connected yet"

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep_connected(), name=f"engine {self.address}")

    def send(self, message: GatewayToEngine) -> None:
        """Never blocks; what cannot be sent is lost together with the connection."""
        if self._connection is not None:
            self._connection.send(encode(message))

    @property
    def connected(self) -> bool:
        return bool(self.engine_id)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _keep_connected(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            if await self._serve():
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)

    async def _serve(self) -> bool:
        """One connection from beginning to end; True if the engine was accepted."""
        loop = asyncio.get_running_loop()
        try:
            family, where = parse_address(self.address)
            async with asyncio.timeout(PING_S * SILENT_TICKS):
                if family == socket.AF_UNIX:
                    _, connection = await loop.create_unix_connection(lambda: _Connection(self._received), where)
                else:
                    _, connection = await loop.create_connection(lambda: _Connection(self._received), *where)
        except (OSError, ValueError) as error:
            self.trouble = f"cannot connect to {self.address}: {error or 'no answer'}"
            return False
        self._connection = connection
        try:
            reason = await self._watch(connection)
        finally:
            accepted = self.connected
            self._connection = None
            connection.abort()
            self._lost(connection.closed.result() if connection.closed.done() else "")
        self.trouble = reason
        return accepted

    async def _watch(self, connection: _Connection) -> str:
        silent = 0
        while not connection.closed.done():
            connection.heard = False
            if self.connected:
                connection.send(encode(Ping()))
            await asyncio.wait([connection.closed], timeout=PING_S)
            silent = 0 if connection.heard else silent + 1
            if silent >= SILENT_TICKS and not connection.closed.done():
                connection.close(f"silent for {silent * PING_S:.1f} s")
        return connection.closed.result()

    def _received(self, connection: _Connection, message: EngineToGateway) -> None:
        if isinstance(message, EngineHello):
            refusal = self._listener.engine_connected(self, message)
            if refusal:
                log.error("engine %s at %s is refused: %s", message.engine_id, self.address, refusal)
                connection.close(f"refused: {refusal}")
                return
            self.engine_id = message.engine_id
            log.info("engine %s (%s) connected at %s", message.engine_id, message.role, self.address)
        elif self.connected:
            self._listener.engine_message(self, message)
        elif not isinstance(message, EngineLoad):
            connection.close(f"{type(message).__name__} before EngineHello")

    def _lost(self, reason: str) -> None:
        """`reason` "": closed from here."""
        if self.connected:
            if reason:
                log.warning("engine %s lost: %s", self.engine_id, reason)
            self._listener.engine_lost(self, reason)
            self.engine_id = ""


class _Connection(asyncio.Protocol):
    def __init__(self, on_message: Callable[[_Connection, EngineToGateway], None]) -> None:
        self._on_message = on_message
        self._decoder: FrameDecoder[EngineToGateway] = FrameDecoder(EngineToGateway)
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.heard = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            messages = self._decoder.feed(data)
        except WireError as error:
            self.close(str(error))
            return
        for message in messages:
            if self.closed.done():
                return
            self._on_message(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(f"connection broke: {exc}" if exc else "the engine closed the connection")

    def send(self, frame: bytes) -> None:
        if self._transport is None or self._transport.is_closing() or self.closed.done():
            return
        self._transport.write(frame)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close("the engine does not read")

    def close(self, reason: str) -> None:
        self._end(reason)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if not self.closed.done():
            self.closed.set_result(reason)
