"""Whose value it is, and its name.

A *scope* is (tenant, namespace, epoch). `epoch` is whatever makes older values wrong, e.g. a weights revision. A
value's *name* is 32 bytes: BLAKE3 of the caller's key, keyed with the scope. The tenant's salt comes from the node
(`Welcome`), so names of another tenant cannot be computed, and every entry carries its scope, so a name alone opens
nothing.
"""

from __future__ import annotations

import msgspec
from blake3 import blake3

from anabranch.core.errors import InvalidInput

NAME_BYTES = 32
SCOPE_BYTES = 16
MAX_KEY_BYTES = 1024
_SCOPE_CONTEXT = "anabranch 2026-12-01 value scope v1"
_NAME_CONTEXT = "anabranch 2026-12-01 value names v1"
Key = str | bytes


class Scope(msgspec.Struct, frozen=True):
    tenant: str
    namespace: str = "default"
    epoch: str = ""

    def digest(self) -> bytes:
        """SCOPE_BYTES that nodes and disks keep beside each value."""
        return blake3(_fields(self.tenant, self.namespace, self.epoch), derive_key_context=_SCOPE_CONTEXT).digest()[
            :SCOPE_BYTES
        ]

    def name_key(self, salt: bytes) -> bytes:
        """The 32-byte key with which this scope's names are digested; `salt` is the tenant's."""
        text = _fields(self.tenant, self.namespace, self.epoch)
        return blake3(len(salt).to_bytes(8, "little") + salt + text, derive_key_context=_NAME_CONTEXT).digest()


def name_of(key: Key, name_key: bytes) -> bytes:
    """The name of one key (many at once: `store.values.live.names`). Raises InvalidInput as `key_bytes`, and if it is
    empty or longer than MAX_KEY_BYTES."""
    data = key_bytes(key)
    if not 0 < len(data) <= MAX_KEY_BYTES:
        raise InvalidInput(f"a key has 1 to {MAX_KEY_BYTES} bytes, this one has {len(data)}")
    return blake3(data, key=name_key).digest()


def key_bytes(key: Key) -> bytes:
    """Bytes as they are, a str as UTF-8. Raises InvalidInput for text that UTF-8 does not know and for anything
    else."""
    if isinstance(key, bytes):
        return key
    try:
        return key.encode() if isinstance(key, str) else bytes(memoryview(key))
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a key is not valid Unicode: {error.reason}") from error
    except TypeError as error:
        raise InvalidInput(f"a key is text or bytes, not {type(key).__name__}") from error


def _fields(*parts: str) -> bytes:
    encoded = [part.encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in encoded)
