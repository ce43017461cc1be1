"""Ask a node or a directory how it is."""

from __future__ import annotations

from typing import Any

import msgspec

from anabranch.core.errors import AccessDenied, Unavailable
from anabranch.core.live.handshake import OPEN_DIALER, Dialer
from anabranch.core.wire import FrameDecoder, encode
from anabranch.store.live.directory_refusal import FromDirectory, refusal
from anabranch.store.messages import Stat, StatRequest


def ask_stat(address: str, *, timeout_s: float = 2.0, dial: Dialer = OPEN_DIALER) -> Stat:
    """`address`: the node's socket for engines, or the directory's. Raises Unavailable, or AccessDenied if
    it wants a proof that `dial` does not give."""
    decoder: FrameDecoder[Any] = FrameDecoder(FromDirectory)
    sock = dial(address, timeout_s=timeout_s)
    try:
        sock.settimeout(timeout_s)
        sock.sendall(encode(StatRequest()))
        while data := sock.recv(1 << 16):
            for message in decoder.feed(data):
                if refused := refusal(address, message):
                    raise AccessDenied(str(refused)) if refused.denied else refused
                if isinstance(message, Stat):
                    return message
    except (OSError, msgspec.MsgspecError) as error:
        raise Unavailable(f"{address} does not answer: {error}") from error
    finally:
        sock.close()
    raise Unavailable(f"{address} closed the connection")
