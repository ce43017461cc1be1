"""What names a block besides its tokens: everything that changes its bytes.

**Covers** the identity and its digest, the root of the key chain. **Does not cover** the chain (`blocks.hashing`) or
what merely describes an instance (process id, port, free memory, maximal context, adapter slot, a model's display
name): such things never enter an identity.
"""

from __future__ import annotations

from typing import Any

import msgspec
from blake3 import blake3

from anabranch.blocks.canonical import Reason, Unencodable, as_pairs, encode_pairs
from anabranch.blocks.hashing import KEY_BYTES, PrefixChain
from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import InvalidInput

KEY_VERSION = 1
"""Grows when the key format changes; blocks of another version are never found."""
_ROOT_CONTEXT = "anabranch 2026-12-01 block identity v1"


class Uncacheable(msgspec.Struct, frozen=True):
    """A request whose identity has no encoding: serve it without looking up or publishing blocks, and count `reason`
    (one of few words, see `blocks.canonical.Unencodable`). `message` says which value and why, for a person."""

    reason: Reason
    message: str


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """`weights_digest` names the weights (any change of weights changes it), `dtype` what they are computed in, `codec`
    how stored K/V is compressed, `layout` how its bytes lie (tokens per block and shard included), `adapter_digest` the
    adapter's content (None or b"": none), `extra` anything else that changes the bytes: a mapping or pairs (order does
    not count; None, and a value of None or an empty collection, say nothing).

    `media` are (token offset, 32-byte digest) of images and the like. They enter the keys from the block in which they
    start and not the root, so that requests share the text before their first image: pass them to the chain (`chain`
    does). A request is unequal to another from the first block in which they differ.
    """

    weights_digest: bytes
    layout: KvLayout
    dtype: str = "float32"
    codec: str = "none"
    adapter_digest: bytes | None = None
    media: tuple[tuple[int, bytes], ...] = ()
    extra: Any = None
    key_version: int = KEY_VERSION

    def root(self) -> bytes:
        """The 32-byte digest that starts the key chain. Raises InvalidInput if the identity has no encoding; where a
        request brings parts of it, use `encode_identity`."""
        root = encode_identity(self)
        if isinstance(root, Uncacheable):
            raise InvalidInput(root.message)
        return root

    def chain(self, hash_key: bytes) -> PrefixChain:
        """A new key chain of this identity, media included. Raises InvalidInput like `root`."""
        return PrefixChain(self.root(), hash_key, self.layout.block_tokens, media=self.media)


def encode_identity(identity: Identity) -> bytes | Uncacheable:
    """The root of the identity's key chain: BLAKE3 of its canonical bytes, or why there is none."""
    try:
        return blake3(canonical_bytes(identity), derive_key_context=_ROOT_CONTEXT).digest()
    except Unencodable as error:
        return Uncacheable(error.reason, str(error))


def canonical_bytes(identity: Identity) -> bytes:
    """What is digested: equal for equal meanings, different for different ones. Raises Unencodable."""
    if not identity.weights_digest:
        raise Unencodable("weights", "the weights have no digest: blocks of unknown weights are never shared")
    _check_media(identity.media)
    fields = [
        ("weights", identity.weights_digest),
        ("dtype", identity.dtype),
        ("codec", identity.codec),
        ("layout", msgspec.structs.asdict(identity.layout)),
        ("adapter", identity.adapter_digest or None),
        ("version", identity.key_version),
    ]
    return encode_pairs(fields) + encode_pairs(as_pairs(identity.extra))


def _check_media(media: tuple[tuple[int, bytes], ...]) -> None:
    offsets = {offset for offset, _ in media}
    if len(offsets) < len(media) or any(offset < 0 for offset in offsets):
        raise Unencodable("media", f"media offsets {sorted(offset for offset, _ in media)} are negative or repeated")
    if any(len(digest) != KEY_BYTES for _, digest in media):
        raise Unencodable("media", f"a media digest must have {KEY_BYTES} bytes")
