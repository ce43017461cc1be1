"""Questions to the processes of a running cluster, each over the process's own protocol with a short deadline."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Callable
from typing import Any, TypeVar

from anabranch.core.errors import Unavailable, WireError
from anabranch.core.live.link import connect
from anabranch.core.messages import Message
from anabranch.core.wire import FrameDecoder, encode
from anabranch.engine.messages import EngineHello, EngineLoad, EngineToGateway, Ping
from anabranch.store.messages import Stat, StatRequest

PROBE_S = 1.0
T = TypeVar("T")


def ask(address: str, question: Message, incoming: Any, wanted: type[T], *, timeout_s: float = PROBE_S) -> T:
    """Send one message and return the first answer of type `wanted`, skipping others. Raises Unavailable."""
    deadline = time.monotonic() + timeout_s
    decoder: FrameDecoder[Any] = FrameDecoder(incoming)
    with connect(address, timeout_s=timeout_s) as sock:
        try:
            sock.settimeout(timeout_s)
            sock.sendall(encode(question))
            while (left := deadline - time.monotonic()) > 0:
                sock.settimeout(left)
                data = sock.recv(1 << 16)
                if not data:
                    raise Unavailable(f"{address} closed the connection")
                for message in decoder.feed(data):
                    if isinstance(message, wanted):
                        return message
        except (OSError, WireError) as error:
            raise Unavailable(f"{address}: {error or type(error).__name__}") from error
    raise Unavailable(f"{address} did not answer within {timeout_s:g} s")


def stat(address: str, *, timeout_s: float = PROBE_S) -> Stat:
    """Census and counters of a node or directory. Raises Unavailable."""
    return ask(address, StatRequest(), Stat, Stat, timeout_s=timeout_s)


def engine_hello(address: str, *, timeout_s: float = PROBE_S) -> EngineHello:
    """Who an engine is. Raises Unavailable."""
    return ask(address, Ping(), EngineToGateway, EngineHello, timeout_s=timeout_s)


def engine_load(address: str, *, timeout_s: float = PROBE_S) -> EngineLoad:
    """The load of an engine, at once after a Ping. Raises Unavailable."""
    return ask(address, Ping(), EngineToGateway, EngineLoad, timeout_s=timeout_s)


def answers(address: str, probe: Callable[[str], object]) -> bool:
    """Whether a probe gets its answer."""
    try:
        probe(address)
    except Unavailable:
        return False
    return True


def http_status(host: str, port: int, path: str, *, timeout_s: float = PROBE_S) -> int:
    """The status of a GET; 0 if there is no answer."""
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=timeout_s)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
