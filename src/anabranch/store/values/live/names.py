"""Names of many keys at once, bit-identical to `scope.name_of`.

**Covers** joining keys cheaply for one compiled call. **See also** `scope` for what a name is, `index.present_keys` for
names that are only looked up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from anabranch.core.errors import InvalidInput
from anabranch.store.values.live.native import fresh_bytes, library
from anabranch.store.values.scope import NAME_BYTES, Key, key_bytes, name_of

_TEXT_SEPARATOR = b"\0"
_BYTES_SEPARATOR = b"\0\x9d\x2b\xe7\x51\xc8\x76\x1f"
_AT_ONCE = 4096
_FEW = 3


class Joined(NamedTuple):
    """Keys end to end for a compiled call: between them `separator`, or of the sizes in `sizes` (uint32)."""

    data: bytes
    separator: bytes
    sizes: bytes | None


def names_of(keys: Sequence[Key], name_key: bytes) -> bytes:
    """NAME_BYTES for each key, end to end. Raises InvalidInput, naming the index, if a key is empty, longer than
    MAX_KEY_BYTES or no text that UTF-8 knows, or if `name_key` has not 32 bytes."""
    if len(name_key) != NAME_BYTES:
        raise InvalidInput(f"a name key has {NAME_BYTES} bytes, this one has {len(name_key)}")
    native = library()
    count = len(keys)
    if native is None or count < _FEW:
        return names_in_python(keys, name_key)
    if count > _AT_ONCE:
        return b"".join(names_of(keys[at : at + _AT_ONCE], name_key) for at in range(0, count, _AT_ONCE))
    names: bytes = fresh_bytes(None, count * NAME_BYTES)
    for join in (joined, joined_by_size):
        data, separator, sizes = join(keys)
        if native.names_of(data, len(data), separator, len(separator), sizes, count, name_key, names) == 0:
            return names
    return names_in_python(keys, name_key)


def joined(keys: Sequence[Key]) -> Joined:
    """The quick way for keys of one kind. A compiled call refuses it if a key holds the separator: `joined_by_size`."""
    try:
        if isinstance(keys[0], str):
            return Joined("\0".join(keys).encode(), _TEXT_SEPARATOR, None)  # type: ignore[arg-type]
        return Joined(_BYTES_SEPARATOR.join(keys), _BYTES_SEPARATOR, None)  # type: ignore[arg-type]
    except (TypeError, UnicodeEncodeError):
        return joined_by_size(keys)


def joined_by_size(keys: Sequence[Key]) -> Joined:
    """Any keys. Raises InvalidInput, naming the index, for what `scope.key_bytes` refuses."""
    parts = [_indexed(key_bytes, key, index) for index, key in enumerate(keys)]
    return Joined(b"".join(parts), b"", array("I", map(len, parts)).tobytes())


def names_in_python(keys: Sequence[Key], name_key: bytes) -> bytes:
    """The twin of the compiled call; also says which key is wrong."""

    def name(key: Key) -> bytes:
        return name_of(key, name_key)

    return b"".join(_indexed(name, key, index) for index, key in enumerate(keys))


def _indexed(step: Callable[[Key], bytes], key: Key, index: int) -> bytes:
    try:
        return step(key)
    except InvalidInput as error:
        raise InvalidInput(f"key {index}: {error}") from error
