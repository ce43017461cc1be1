"""How the bytes of a block are arranged.

A Full Block is `layers` Layer Blocks laid end to end: cutting one into the other is arithmetic, never a copy.

    kind "kv"   Layer Block = [2 (K, V)][block_tokens][kv_heads][head_dim]     MHA and GQA
    kind "mla"  Layer Block = [1][block_tokens][1][head_dim]                   head_dim = latent + rope dims

Tokens are outermost inside K and V, so the first n tokens of K are one contiguous run.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.core.errors import ConfigError

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of one shard of a model's K/V. Equal layouts hold interchangeable bytes.

    `layers` and `kv_heads` count what *this shard* holds (tensor parallelism cuts heads, pipeline
    parallelism cuts layers); the shard's place is named so that shards never mix.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: Dtype = "float32"
    kind: Literal["kv", "mla"] = "kv"
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens", "tp_size", "pp_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"layout field {name} must be at least 1, got {getattr(self, name)}")
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise ConfigError(f"shard rank outside its size in {self}")
        if self.kind == "mla" and self.kv_heads != 1:
            raise ConfigError("an MLA layout has exactly one latent head")

    @property
    def parts(self) -> int:
        """2 for K and V, 1 for an MLA latent."""
        return 2 if self.kind == "kv" else 1

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer, K and V together."""
        return self.parts * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layers * self.token_layer_bytes

    @property
    def layer_block_bytes(self) -> int:
        return self.block_tokens * self.token_layer_bytes

    @property
    def full_block_bytes(self) -> int:
        return self.layers * self.layer_block_bytes
