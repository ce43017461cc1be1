"""Framing of control messages: 4-byte big-endian length, then msgpack of a tagged Struct.

**Covers** encoding, incremental decoding and the size limit. **Does not cover** sockets (`core.live.link`) or bulk
bytes: those follow a header message raw, outside any frame (`transfer/live`).
"""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec

from anabranch.core.errors import WireError
from anabranch.core.messages import Message

MAX_FRAME_BYTES = 16 << 20
HEADER = struct.Struct(">I")
_encoder = msgspec.msgpack.Encoder()
M = TypeVar("M")


def encode(message: Message) -> bytes:
    """One frame. Raises WireError if it would exceed MAX_FRAME_BYTES."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"{type(message).__name__} of {len(body)} bytes exceeds a frame of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


class FrameDecoder(Generic[M]):
    """Turns a byte stream into messages of one union type.

    Raises WireError on an oversized or malformed frame; the connection is then unusable and must be closed.
    """

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[M]:
        self._buffer += data
        messages: list[M] = []
        at = 0
        view = memoryview(self._buffer)
        try:
            while len(view) - at >= HEADER.size:
                (length,) = HEADER.unpack_from(view, at)
                if length > MAX_FRAME_BYTES:
                    raise WireError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
                if len(view) - at - HEADER.size < length:
                    break
                start = at + HEADER.size
                try:
                    messages.append(self._decoder.decode(view[start : start + length]))
                except msgspec.MsgspecError as error:
                    raise WireError(f"malformed message: {error}") from error
                at = start + length
        finally:
            view.release()
        del self._buffer[:at]
        return messages
