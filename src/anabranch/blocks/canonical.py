"""One byte string for one meaning: the encoding under an identity's digest.

Every value is a type tag, the payload's length (u64, big-endian) and the payload, so no two meanings share bytes.
Equal meanings have equal bytes: the order of a mapping or set does not count, a list equals a tuple, and in a
mapping a value of None or an empty collection says nothing and is left out. Nothing depends on hash seeds, object
addresses or `repr`. True, 1, 1.0 and "1" are different meanings.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Literal

from anabranch.core.errors import InvalidInput

MAX_DEPTH = 16
Reason = Literal["type", "nan", "text", "depth", "ambiguous", "shape", "weights", "media"]
_LENGTH = struct.Struct(">Q")


class Unencodable(InvalidInput):
    """A value has no canonical encoding. `reason` is one of few words, fit for a metric's label:

    type       a type without an encoding                    depth      nested deeper than MAX_DEPTH
    nan        not a number equals nothing, itself included  ambiguous  a key is given twice with different values
    text       text with lone surrogates                     shape      neither a mapping nor pairs
    weights    the weights are not named                     media      a medium has no proper offset or digest
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


def encode_value(value: object, depth: int = 0) -> bytes:
    """The canonical bytes of `value`. Raises Unencodable."""
    if depth > MAX_DEPTH:
        raise Unencodable("depth", f"values nested deeper than {MAX_DEPTH} have no identity")
    if isinstance(value, Mapping):
        return encode_pairs(value.items(), depth)
    if isinstance(value, list | tuple):
        return _tagged(b"l", b"".join(encode_value(item, depth + 1) for item in value))
    if isinstance(value, AbstractSet):
        return _tagged(b"e", b"".join(sorted({encode_value(item, depth + 1) for item in value})))
    return _scalar(value)


def encode_pairs(pairs: Iterable[tuple[object, object]], depth: int = 0) -> bytes:
    """The canonical bytes of a mapping. Raises Unencodable, also if one key has two values."""
    encoded: dict[bytes, tuple[bytes, bool]] = {}
    for key, value in pairs:
        name = encode_value(key, depth + 1)
        entry = encode_value(value, depth + 1)
        if encoded.setdefault(name, (entry, _says_nothing(entry)))[0] != entry:
            raise Unencodable("ambiguous", f"key {key!r} is given twice with different values")
    return _tagged(b"m", b"".join(name + encoded[name][0] for name in sorted(encoded) if not encoded[name][1]))


def as_pairs(extra: object) -> list[tuple[object, object]]:
    """The pairs of a mapping or of a sequence of pairs; None has none. Raises Unencodable("shape")."""
    if extra is None:
        return []
    if isinstance(extra, Mapping):
        return list(extra.items())
    if not isinstance(extra, list | tuple):
        raise Unencodable("shape", f"extra identity must be a mapping or pairs, not {type(extra).__name__}")
    pairs: list[tuple[object, object]] = []
    for item in extra:
        if not isinstance(item, list | tuple) or len(item) != 2:
            raise Unencodable("shape", f"extra identity must be made of pairs, not {item!r:.60}")
        pairs.append((item[0], item[1]))
    return pairs


def _scalar(value: object) -> bytes:
    if value is None:
        return _tagged(b"n", b"")
    if isinstance(value, bool):
        return _tagged(b"?", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _tagged(b"i", value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True))
    if isinstance(value, float):
        if math.isnan(value):
            raise Unencodable("nan", "a value that is not a number has no identity")
        return _tagged(b"d", struct.pack(">d", value))
    if isinstance(value, str):
        try:
            return _tagged(b"s", value.encode())
        except UnicodeEncodeError as error:
            raise Unencodable("text", f"text {value!r:.60} has lone surrogates") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return _tagged(b"b", bytes(value))
    raise Unencodable("type", f"a value of type {type(value).__name__} has no canonical encoding")


def _tagged(tag: bytes, payload: bytes) -> bytes:
    return tag + _LENGTH.pack(len(payload)) + payload


_NOTHING = frozenset(_tagged(tag, b"") for tag in (b"n", b"l", b"e", b"m"))


def _says_nothing(entry: bytes) -> bool:
    return entry in _NOTHING
