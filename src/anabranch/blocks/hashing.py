"""Block keys: a BLAKE3 prefix chain (stub: the contract; filled by the blocks work)."""

from __future__ import annotations

from collections.abc import Sequence

KEY_BYTES = 32


class PrefixChain:
    """Names the blocks of one token sequence, incrementally.

    key_i = BLAKE3(parent_key_{i-1} ‖ token ids of block i as little-endian u32, key=hash_key)[:32];
    parent of block 0 is `root` (the digest of the identity, `blocks.key.Identity.root`).
    Only full blocks have names.
    """

    def __init__(self, root: bytes, hash_key: bytes, block_tokens: int) -> None:
        raise NotImplementedError

    def extend(self, tokens: Sequence[int]) -> list[bytes]:
        """Append tokens; return the keys of the blocks that became full, in order."""
        raise NotImplementedError

    @property
    def keys(self) -> list[bytes]:
        """Keys of all full blocks so far."""
        raise NotImplementedError


def prefix_keys(root: bytes, hash_key: bytes, block_tokens: int, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all full blocks of `tokens`."""
    chain = PrefixChain(root, hash_key, block_tokens)
    chain.extend(tokens)
    return chain.keys
