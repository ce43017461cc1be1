"""Hostile frames: what a peer that is broken, old or evil may send. Seeded; made from valid messages.

**Covers** mutations of any tagged Struct and of its bytes. **See also** `testing.live.attacker`, which sends them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from anabranch.core.messages import Message
from anabranch.core.wire import HEADER, MAX_FRAME_BYTES

Make = Callable[[random.Random], Message]
NUMBERS = (-1, 0, 1, 2, 255, 256, 65_535, 65_537, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
BOMBS = (
    b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
    b"\xdf\xff\xff\xff\xff",  # a map of 4 billion
    b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    b"\x91" * 100_000,  # deeper than any stack
    b"\x81\xa4type" * 20_000,
    b"",
    b"\xc1",
    b"\xc0" * 1000,
)


class Frame(msgspec.Struct, frozen=True):
    """`data`: what goes on the wire. `kind`: what was done to it. `ends`: a correct peer closes the connection, so that
    nothing behind it counts. `message`: what it is if it is valid."""

    data: bytes
    kind: str
    ends: bool = False
    message: Message | None = None


class Mutator:
    """An endless sequence of frames from `makers`, each of which makes a valid message."""

    def __init__(self, seed: int, makers: Sequence[Make]) -> None:
        self._random = random.Random(seed)
        self._makers = makers
        self._kinds: list[tuple[int, Callable[[], Frame]]] = [
            (40, self._valid),
            (40, self._odd_value),
            (4, self._odd_type),
            (4, self._flipped),
            (2, self._truncated),
            (2, self._lying_length),
            (1, self._oversized),
            (2, self._garbage),
            (2, self._bomb),
            (1, self._unknown_tag),
            (2, self._unknown_fields),
        ]

    def next(self) -> Frame:
        weights = [weight for weight, _ in self._kinds]
        kinds = [kind for _, kind in self._kinds]
        make = self._random.choices(kinds, weights)[0]
        return make()

    def body(self) -> bytes:
        return msgspec.msgpack.encode(self._message())

    def _message(self) -> Message:
        return self._random.choice(self._makers)(self._random)

    def _valid(self) -> Frame:
        message = self._message()
        return Frame(framed(msgspec.msgpack.encode(message)), "valid", message=message)

    def _odd_value(self) -> Frame:
        """Right types, absurd values: reaches what checks meaning."""
        fields = self._fields()
        name = self._random.choice(list(fields))
        if name != "type":
            fields[name] = self._odd(fields[name])
        return Frame(framed(msgspec.msgpack.encode(fields)), "odd value")

    def _odd_type(self) -> Frame:
        fields = self._fields()
        fields[self._random.choice(list(fields))] = self._random.choice(
            (None, 1.5, "x", b"\xff", [], [[[]]], {"a": 1}, True, -1, ["x"] * 10)
        )
        return Frame(framed(msgspec.msgpack.encode(fields)), "odd type", ends=True)

    def _flipped(self) -> Frame:
        body = bytearray(self.body())
        for _ in range(self._random.randint(1, 4)):
            body[self._random.randrange(len(body))] ^= 1 << self._random.randrange(8)
        return Frame(framed(bytes(body)), "flipped", ends=True)

    def _truncated(self) -> Frame:
        data = framed(self.body())
        return Frame(data[: self._random.randrange(len(data))], "truncated", ends=True)

    def _lying_length(self) -> Frame:
        body = self.body()
        length = max(0, len(body) + self._random.choice((-len(body), -5, -1, 1, 7, 1000)))
        return Frame(HEADER.pack(length) + body, "lying length", ends=True)

    def _oversized(self) -> Frame:
        length = self._random.choice((MAX_FRAME_BYTES + 1, 2**31, 2**32 - 1))
        return Frame(HEADER.pack(length) + self.body(), "oversized", ends=True)

    def _garbage(self) -> Frame:
        return Frame(self._random.randbytes(self._random.randint(1, 4096)), "garbage", ends=True)

    def _bomb(self) -> Frame:
        bomb = self._random.choice(BOMBS)
        if self._random.random() < 0.5:  # in the place of a field
            fields = self._fields()
            name = self._random.choice(list(fields))
            packed = msgspec.msgpack.encode({**fields, name: msgspec.Raw(bomb or b"\xc0")})
            return Frame(framed(packed), "bomb in a field", ends=True)
        return Frame(framed(bomb), "bomb", ends=True)

    def _unknown_tag(self) -> Frame:
        tag = self._random.choice(("", "Message", "Welcome", "__import__", "Drain" * 1000, "hello", "Quit\0"))
        return Frame(framed(msgspec.msgpack.encode({**self._fields(), "type": tag})), "unknown tag", ends=True)

    def _unknown_fields(self) -> Frame:
        """Allowed: a newer peer's."""
        fields = {**self._fields(), "later": [1, {"a": b"b"}], "x" * 300: None}
        return Frame(framed(msgspec.msgpack.encode(fields)), "unknown fields")

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.msgpack.decode(self.body())
        return fields

    def _odd(self, value: Any) -> Any:
        pick = self._random
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return pick.choice(NUMBERS)
        if isinstance(value, float):
            return pick.choice((-1.0, 0.0, 1e300, float("inf"), float("nan"), 1e-300))
        if isinstance(value, bytes):
            same = (value[:-1], value + b"\0", value * 2, value[::-1])
            return pick.choice((b"", *same, pick.randbytes(32), bytes(32 * 300)))
        if isinstance(value, str):
            return pick.choice(("", "x" * 100_000, "../../etc/passwd", "\0", value + "\ud7ff", "default"))
        if isinstance(value, list):
            odd = [self._odd(one) for one in value[:3]]
            return pick.choice(([], value * 2, value[:-1], odd, value * 500, [2**62] * (len(value) or 1)))
        if isinstance(value, dict):
            odd_values = {name: self._odd(one) for name, one in value.items()}
            return pick.choice(({}, {f"{i}": i for i in range(1000)}, odd_values))
        return pick.choice(NUMBERS)


def framed(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body
