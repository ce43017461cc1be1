"""Byte ranges in blocks, shards, and checksums."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from anabranch.blocks.checksum import block_sum, layer_sum
from anabranch.blocks.layout import KvLayout
from anabranch.blocks.slices import Shard, Span, attention_layout, layer_span, mla_layout, slot_span, token_spans
from anabranch.core.errors import ConfigError, InvalidInput

LAYOUT = attention_layout(layers=3, kv_heads=2, head_dim=4, block_tokens=5, dtype="float16")
LATENT = mla_layout(layers=3, latent_dim=6, rope_dim=2, block_tokens=5)


def labelled(layout: KvLayout) -> list[tuple[int, int, int]]:
    """(layer, part, token) of every byte of a Full Block, spelled out from the layout's docstring."""
    run = layout.token_layer_bytes // layout.parts
    return [
        (layer, part, token)
        for layer in range(layout.layers)
        for part in range(layout.parts)
        for token in range(layout.block_tokens)
        for _ in range(run)
    ]


@pytest.mark.parametrize("layout", [LAYOUT, LATENT], ids=["kv", "mla"])
def test_spans_cover_exactly_the_bytes_they_name(layout: KvLayout) -> None:
    block = labelled(layout)
    assert len(block) == layout.full_block_bytes
    for layer in range(layout.layers):
        span = layer_span(layout, layer)
        layer_block = block[span.offset : span.end]
        assert len(layer_block) == layout.layer_block_bytes == span.length
        assert all(label[0] == layer for label in layer_block)
        for first, count in ((0, 5), (0, 3), (2, 2), (4, 1), (5, 0)):
            spans = token_spans(layout, first, count)
            assert len(spans) == layout.parts
            named = [label for span in spans for label in layer_block[span.offset : span.end]]
            assert named == [label for label in layer_block if first <= label[2] < first + count]
    assert layer_span(layout, 1, 2) == Span(layout.layer_block_bytes, 2 * layout.layer_block_bytes)
    assert slot_span(layout, 3) == Span(3 * layout.full_block_bytes, layout.full_block_bytes)


def test_spans_outside_a_block_are_refused() -> None:
    for layer, count in ((3, 1), (-1, 1), (0, 4), (1, -1)):
        with pytest.raises(InvalidInput, match="layers"):
            layer_span(LAYOUT, layer, count)
    for first, count in ((5, 1), (-1, 1), (0, 6), (2, -1)):
        with pytest.raises(InvalidInput, match="tokens"):
            token_spans(LAYOUT, first, count)
    with pytest.raises(InvalidInput, match="negative"):
        slot_span(LAYOUT, -1)


@given(total=st.integers(1, 100), size=st.integers(1, 12))
def test_pipeline_stages_share_out_all_layers_in_order(total: int, size: int) -> None:
    shards = [Shard(pp_rank=rank, pp_size=size) for rank in range(size)]
    if total < size:
        with pytest.raises(ConfigError, match="pipeline"):
            shards[0].layers(total)
        return
    parts = [shard.layers(total) for shard in shards]
    assert [layer for part in parts for layer in part] == list(range(total))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_tensor_parallel_ranks_share_heads() -> None:
    assert [Shard(tp_rank=rank, tp_size=2).kv_heads(8) for rank in range(2)] == [range(4), range(4, 8)]
    assert [Shard(tp_rank=rank, tp_size=4).kv_heads(2).start for rank in range(4)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match="divide"):
        Shard(tp_size=2).kv_heads(3)
    with pytest.raises(ConfigError, match="rank"):
        Shard(tp_rank=2, tp_size=2)
    with pytest.raises(ConfigError, match="rank"):
        Shard(pp_size=0)


def test_layouts_from_model_numbers() -> None:
    shard = Shard(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2)
    layout = attention_layout(layers=31, kv_heads=8, head_dim=64, block_tokens=16, dtype="bfloat16", shard=shard)
    assert (layout.layers, layout.kv_heads, layout.tp_rank, layout.pp_rank) == (15, 4, 1, 1)
    assert layout.full_block_bytes == 15 * 2 * 16 * 4 * 64 * 2
    latent = mla_layout(
        layers=61, latent_dim=512, rope_dim=64, block_tokens=64, dtype="bfloat16", shard=Shard(tp_size=8)
    )
    assert (latent.kv_heads, latent.head_dim, latent.token_bytes) == (1, 576, 61 * 576 * 2)
    whole = [
        attention_layout(layers=30, kv_heads=4, head_dim=8, block_tokens=16, shard=Shard(tp_rank=rank, tp_size=2))
        for rank in range(2)
    ]
    assert whole[0] != whole[1]
    assert sum(part.full_block_bytes for part in whole) == (
        attention_layout(layers=30, kv_heads=4, head_dim=8, block_tokens=16).full_block_bytes
    )


def test_checksums_are_the_documented_function() -> None:
    data = bytearray(range(256)) * 40
    sums = [layer_sum(data), layer_sum(memoryview(data)[:100]), layer_sum(b"")]
    assert sums[0] == xxhash.xxh3_64_intdigest(bytes(data))
    assert block_sum(sums) == xxhash.xxh3_64_intdigest(struct.pack("<3Q", *sums))
    assert layer_sum(b"abc") == 0x78AF5F94892F3950  # published test value of XXH3-64, seed 0
    assert block_sum(sums) != block_sum(sums[::-1])
    for at in (0, 5000, len(data) - 1):
        data[at] ^= 1
        assert layer_sum(data) != sums[0]
        data[at] ^= 1
