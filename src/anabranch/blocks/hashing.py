"""Block keys: a keyed BLAKE3 prefix chain.

**Covers** naming the full blocks of one token sequence, media included, and the tenant's hash key.
**Does not cover** what the chain starts from: the identity's digest (`blocks.key`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

from anabranch.core.errors import InvalidInput

KEY_BYTES = 32
MIN_SECRET_BYTES = 16
_TENANT_CONTEXT = "anabranch 2026-12-01 tenant hash key v1"
_TOKEN_BYTES = 4
_MEDIUM = struct.Struct("<I32s")

Media = Sequence[tuple[int, bytes]]
"""(token offset at which a medium starts, 32-byte digest of its content), in any order, no offset twice."""


class PrefixChain:
    """Names the blocks of one token sequence, incrementally.

    key_i = BLAKE3(parent_key_{i-1} ‖ token ids of block i as little-endian u32 ‖ media_i, key=hash_key)[:32];
    parent of block 0 is `root` (the digest of the identity, `blocks.key.Identity.root`).
    media_i: for each medium whose first token lies in block i, in order, its place in the block (u32) and its whole
    digest; empty for text. As a key covers its parent's, a medium changes the block it starts in and all later ones,
    and none before. The tail's length tells the number of media, so the encoding is injective.
    Only full blocks have names.

    Raises InvalidInput for a key, root or digest that is not 32 bytes, and for a token id outside u32.
    """

    def __init__(self, root: bytes, hash_key: bytes, block_tokens: int, *, media: Media = ()) -> None:
        if len(root) != KEY_BYTES or len(hash_key) != KEY_BYTES:
            raise InvalidInput(f"root and hash key must have {KEY_BYTES} bytes, got {len(root)} and {len(hash_key)}")
        if block_tokens < 1:
            raise InvalidInput(f"block_tokens must be at least 1, got {block_tokens}")
        self._hash_key = bytes(hash_key)
        self._block_bytes = block_tokens * _TOKEN_BYTES
        self._parent = bytes(root)
        self._media = _media_tails(media, block_tokens)
        self._keys: list[bytes] = []
        self._pending = b""

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Append tokens; return the keys of the blocks that became full, in order."""
        data = self._pending + _token_bytes(tokens)
        size, first = self._block_bytes, len(self._keys)
        parent, hash_key, media, keys = self._parent, self._hash_key, self._media, self._keys
        end = len(data) - len(data) % size
        for at in range(0, end, size):
            message = parent + data[at : at + size]
            if media:
                message += media.get(len(keys), b"")
            parent = blake3(message, key=hash_key).digest()
            keys.append(parent)
        self._parent = parent
        self._pending = data[end:]
        return keys[first:]

    @property
    def keys(self) -> list[bytes]:
        """Keys of all full blocks so far: the chain's own list, which grows with it. Read only."""
        return self._keys

    @property
    def tokens(self) -> int:
        """How many tokens have been appended."""
        return (len(self._keys) * self._block_bytes + len(self._pending)) // _TOKEN_BYTES

    def fork(self) -> PrefixChain:
        """An independent chain that has seen the same tokens (parallel sampling)."""
        twin = PrefixChain.__new__(PrefixChain)
        twin.__dict__.update(self.__dict__)
        twin._keys = list(self._keys)
        return twin


def prefix_keys(
    root: bytes, hash_key: bytes, block_tokens: int, tokens: Sequence[int], *, media: Media = ()
) -> list[bytes]:
    """Keys of all full blocks of `tokens`."""
    chain = PrefixChain(root, hash_key, block_tokens, media=media)
    chain.extend(tokens)
    return chain.keys


def tenant_hash_key(secret: bytes, tenant: str) -> bytes:
    """The 32-byte hash key of a tenant: two tenants never share a block key, and without `secret` nobody can tell
    from a key which text it names. Raises InvalidInput for a secret under 16 bytes or a tenant that is not text."""
    if len(secret) < MIN_SECRET_BYTES:
        raise InvalidInput(f"the tenant secret must have at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
    try:
        name = tenant.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"tenant name {tenant!r} is not valid Unicode") from error
    material = struct.pack("<Q", len(secret)) + secret + name
    return blake3(material, derive_key_context=_TENANT_CONTEXT).digest()


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise InvalidInput(f"token ids must be integers from 0 to 2**32-1: {error}") from error


def _media_tails(media: Media, block_tokens: int) -> dict[int, bytes]:
    tails: dict[int, bytes] = {}
    seen: set[int] = set()
    for offset, digest in sorted(media):
        if len(digest) != KEY_BYTES:
            raise InvalidInput(f"a media digest must have {KEY_BYTES} bytes, got {len(digest)} at offset {offset}")
        if offset < 0 or offset in seen:
            raise InvalidInput(f"media offset {offset} is negative or used twice")
        seen.add(offset)
        block, place = divmod(offset, block_tokens)
        tails[block] = tails.get(block, b"") + _MEDIUM.pack(place, digest)
    return tails
