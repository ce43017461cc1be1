"""Byte ranges inside blocks, and which part of a model a shard holds.

**Covers** Full Block ↔ Layer Block ↔ token run, as (offset, length): arithmetic, never a copy; layouts from a model's
numbers (MHA and GQA, MLA) and a shard's place. **Does not cover** reading those numbers from a model's configuration
(`blocks.models`) or converting between layouts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from anabranch.blocks.layout import Dtype, KvLayout
from anabranch.core.errors import ConfigError, InvalidInput


class Span(NamedTuple):
    """Bytes offset … offset + length - 1."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def layer_span(layout: KvLayout, layer: int, count: int = 1) -> Span:
    """Layer Blocks `layer` … `layer + count - 1` within a Full Block. Raises InvalidInput outside the layout."""
    _inside("layers", layer, count, layout.layers)
    return Span(layer * layout.layer_block_bytes, count * layout.layer_block_bytes)


def token_spans(layout: KvLayout, first: int, count: int) -> list[Span]:
    """Tokens `first` … `first + count - 1` within a Layer Block: one run in K and one in V, or one in the MLA latent.
    Raises InvalidInput outside the layout."""
    _inside("tokens", first, count, layout.block_tokens)
    run = layout.token_layer_bytes // layout.parts
    part = layout.layer_block_bytes // layout.parts
    return [Span(i * part + first * run, count * run) for i in range(layout.parts)]


def slot_span(layout: KvLayout, slot: int) -> Span:
    """The Full Block of `slot` within an arena of consecutive slots."""
    if slot < 0:
        raise InvalidInput(f"slot {slot} is negative")
    return Span(slot * layout.full_block_bytes, layout.full_block_bytes)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a tensor-parallel (`tp`: cuts kv heads) and pipeline-parallel (`pp`: cuts layers) group."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.tp_rank < self.tp_size and 0 <= self.pp_rank < self.pp_size):
            raise ConfigError(f"shard rank outside its size in {self}")

    def layers(self, total: int) -> range:
        """The layers of a model of `total` that this shard holds: runs as equal as can be, longer ones first.
        Raises ConfigError if a rank would hold none."""
        if total < self.pp_size:
            raise ConfigError(f"{total} layers cannot be cut into {self.pp_size} pipeline stages; use at most {total}")
        size, longer = divmod(total, self.pp_size)
        start = self.pp_rank * size + min(self.pp_rank, longer)
        return range(start, start + size + (self.pp_rank < longer))

    def kv_heads(self, total: int) -> range:
        """The kv heads, of `total`, that this shard holds. With more ranks than heads, neighbouring ranks hold the same
        head. Raises ConfigError unless one number divides the other."""
        if total % self.tp_size == 0:
            size = total // self.tp_size
            return range(self.tp_rank * size, (self.tp_rank + 1) * size)
        if self.tp_size % total == 0:
            head = self.tp_rank // (self.tp_size // total)
            return range(head, head + 1)
        raise ConfigError(f"{total} kv heads cannot be shared by {self.tp_size} ranks; one must divide the other")


WHOLE = Shard()


def attention_layout(
    *, layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: Dtype = "float32", shard: Shard = WHOLE
) -> KvLayout:
    """The layout of one shard of a model with `layers` layers and `kv_heads` kv heads in all (MHA: as many as query
    heads; GQA: fewer). Raises ConfigError."""
    return _layout("kv", shard.layers(layers), len(shard.kv_heads(kv_heads)), head_dim, block_tokens, dtype, shard)


def mla_layout(
    *, layers: int, latent_dim: int, rope_dim: int, block_tokens: int, dtype: Dtype = "float32", shard: Shard = WHOLE
) -> KvLayout:
    """The layout of one shard of a multi-head latent attention model (DeepSeek-V2, arXiv 2405.04434, §2.1): per token
    and layer one latent of `latent_dim` and one rotary key of `rope_dim`, the same on every tensor-parallel rank."""
    return _layout("mla", shard.layers(layers), 1, latent_dim + rope_dim, block_tokens, dtype, shard)


def _layout(
    kind: Literal["kv", "mla"],
    layers: range,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: Dtype,
    shard: Shard,
) -> KvLayout:
    return KvLayout(
        layers=len(layers),
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        kind=kind,
        **msgspec.structs.asdict(shard),
    )


def _inside(what: str, first: int, count: int, size: int) -> None:
    if first < 0 or count < 0 or first + count > size:
        raise InvalidInput(f"{what} {first}…{first + count - 1} are outside a block of {size}")
