"""The way back: a prepared model's tensors under their Hugging Face names, as row-major copies.

Lets tests and benchmarks run another implementation on exactly the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from anabranch.engine.live.model.weight_file import Array, TensorFile, unpack, unpack_pair
from anabranch.engine.live.model_files import WEIGHTS_FILE, ModelShape, load_shape


def hf_tensors(prepared: Path) -> dict[str, Array]:
    """float32 arrays; `lm_head.weight` is there also when it is tied (then the same array)."""
    shape, file = load_shape(prepared), TensorFile(prepared / WEIGHTS_FILE)
    embed = unpack(file.float32("embed"), shape.vocab)
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": embed if shape.tied else unpack(file.float32("lm_head"), shape.vocab),
        "model.norm.weight": file.float32("norm").copy(),
    }
    for layer in range(shape.layers):
        tensors.update(_layer(shape, file, layer))
    return tensors


def _layer(shape: ModelShape, file: TensorFile, layer: int) -> Iterator[tuple[str, Array]]:
    ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
    borders = [shape.q_size, shape.q_size + shape.kv_size]
    qkv = unpack(file.float32(f"{ours}.qkv"), shape.q_size + 2 * shape.kv_size)
    for part, weight in zip("qkv", np.split(qkv, borders), strict=True):
        yield f"{theirs}.self_attn.{part}_proj.weight", weight
    if shape.qkv_bias:
        for part, bias in zip("qkv", np.split(file.float32(f"{ours}.qkv_bias"), borders), strict=True):
            yield f"{theirs}.self_attn.{part}_proj.bias", bias.copy()
    if shape.qk_norm:
        yield f"{theirs}.self_attn.q_norm.weight", file.float32(f"{ours}.q_norm").copy()
        yield f"{theirs}.self_attn.k_norm.weight", file.float32(f"{ours}.k_norm").copy()
    gate, up = unpack_pair(file.float32(f"{ours}.gate_up"))
    yield f"{theirs}.mlp.gate_proj.weight", gate
    yield f"{theirs}.mlp.up_proj.weight", up
    yield f"{theirs}.mlp.down_proj.weight", unpack(file.float32(f"{ours}.down"), shape.hidden)
    yield f"{theirs}.self_attn.o_proj.weight", unpack(file.float32(f"{ours}.o"), shape.hidden)
    yield f"{theirs}.input_layernorm.weight", file.float32(f"{ours}.attn_norm").copy()
    yield f"{theirs}.post_attention_layernorm.weight", file.float32(f"{ours}.mlp_norm").copy()
