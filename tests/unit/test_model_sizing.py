"""Bytes of K/V against published figures, and the arithmetic around them.

Published: LLaMA3-70B 320 KiB per token (Mooncake, FAST 2025); Qwen2.5-32B FP16 262 KB; DeepSeek-V3 576 latent elements
per layer. The other expectations are 2 · K/V heads · head dim · 2 bytes · attention layers, written out by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.blocks.models.architecture import Architecture, LayerKeeps
from anabranch.blocks.models.config_json import architecture_of
from anabranch.blocks.models.gguf_metadata import architecture_of_gguf
from anabranch.blocks.models.sizing import Sizing
from anabranch.core.errors import ConfigError, ModelFileError

MODELS = json.loads((Path(__file__).parent / "model_configs.json").read_text())


def sizing_of(name: str, **settings: int) -> Sizing:
    architecture = architecture_of(MODELS[name]["config"], name)
    dtype = architecture.dtype if architecture.dtype == "float32" else "bfloat16"
    return Sizing(architecture=architecture, dtype=dtype, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_known_models(name: str) -> None:
    known, sizing = MODELS[name], sizing_of(name)
    assert sizing.architecture.attention == known["attention"]
    assert sizing.token_bytes == known["token_bytes"]
    assert sizing.growing_token_bytes == known.get("growing", known["token_bytes"])
    assert sizing.state_bytes == known.get("state", 0)
    assert len(sizing.architecture.notes) == known.get("notes", 0)


def test_blocks_are_tokens_times_bytes() -> None:
    sizing = sizing_of("llama-3-70b", block_tokens=16)
    assert sizing.full_block_bytes == 16 * 327_680
    assert sizing.layer_block_bytes == (16 * 4096, 16 * 4096)
    assert sizing_of("openelm-like").layer_block_bytes == (16 * 768, 16 * 1024)


def test_tensor_parallel_ranks_share_heads_and_replicate_latents() -> None:
    assert sizing_of("llama-3-70b", tp=4).token_bytes == 327_680 // 4
    assert sizing_of("llama-3-70b", tp=16).token_bytes == 327_680 // 8  # 8 heads on 16 ranks: each rank holds one
    assert sizing_of("deepseek-v3.2", tp=8).token_bytes == 70_272


def test_a_window_bounds_what_is_held_but_not_what_is_stored() -> None:
    sizing = sizing_of("mistral-7b-v0.1", block_tokens=16)
    bound = sizing.held_bytes(10_000)
    assert bound == sizing.held_bytes(1_000_000) == (4096 // 16 + 1) * 16 * 131_072
    assert sizing.stored_bytes(10_000) == 10_000 // 16 * 16 * 131_072
    assert sizing.held_bytes(100) == 112 * 131_072  # whole blocks
    assert sizing.max_context(1, bound) is None
    assert sizing.max_context(1, bound - 1) == 4096


def test_fits() -> None:
    sizing = sizing_of("llama-3-70b")
    gib = 1 << 30
    assert sizing.max_concurrency(8192, 40 * gib) == 40 * gib // (8192 * 327_680) == 16
    assert sizing.max_context(16, 40 * gib) == 8192
    assert sizing.max_context(1, 1000) == 0
    assert sizing.max_concurrency(1, 0) == 0


def test_nothing_grows_without_attention() -> None:
    sizing = sizing_of("mamba2-2.7b")
    assert sizing.layer_block_bytes == (0, 0)
    assert sizing.held_bytes(10) == sizing.held_bytes(10**6) == sizing.state_bytes
    assert sizing.max_context(1, sizing.state_bytes) is None
    assert sizing.max_context(2, sizing.state_bytes) == 0
    nothing = Sizing(architecture=Architecture(name="x", attention="none", layers=(LayerKeeps(),)), dtype="float32")
    assert nothing.max_concurrency(100, 1) is None


def test_recurrent_state_may_have_its_own_dtype() -> None:
    config = {**MODELS["nemotron-h-8b"]["config"], "mamba_ssm_cache_dtype": "float32"}
    wide = Sizing(architecture=architecture_of(config), dtype="bfloat16")
    assert wide.state_bytes - sizing_of("nemotron-h-8b").state_bytes == 24 * 128 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ([], "expected a JSON object"),
        ({}, "looked for num_hidden_layers"),
        ({"num_hidden_layers": 2}, "number of attention heads; looked for num_attention_heads, n_head"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4}, "size of a head; looked for head_dim"),
        ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}, "no multiple of 3 heads"),
        ({"num_hidden_layers": "two"}, "must be a whole number, got 'two'"),
        ({"num_hidden_layers": 1, "layer_types": ["quantum"]}, "unknown layer type 'quantum'"),
        ({"num_hidden_layers": 3, "layer_types": ["attention"]}, "layer_types names 1"),
        ({"hybrid_override_pattern": "M?"}, "unknown layer type '?'"),
        ({"is_encoder_decoder": True, "num_layers": 2}, "encoder-decoder"),
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "kv_lora_rank": 512}, "looked for qk_rope_head_dim"),
        ({"num_hidden_layers": 2, "num_query_heads": [2, 2], "num_kv_heads": [1]}, "names 1 layers of 2"),
        (
            {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "num_kv_shared_layers": 2},
            "num_kv_shared_layers is 2",
        ),
    ],
)
def test_errors_name_the_fields(config: object, says: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        architecture_of(config, "some/config.json")
    assert says in str(caught.value)
    assert "some/config.json" in str(caught.value)


def test_undescribed_state_is_said_not_guessed() -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
        "layer_types": ["attention", "linear_attention"],
    }
    architecture = architecture_of(config)
    assert architecture.state_layers == 0
    assert "not counted" in architecture.notes[0]


@pytest.mark.parametrize("settings", [{"block_tokens": 0}, {"tp": 0}])
def test_impossible_settings(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        sizing_of("gpt2", **settings)


def test_gguf_metadata_says_the_same_as_config_json() -> None:
    dense = {
        "general.architecture": "llama",
        "llama.block_count": 80,
        "llama.embedding_length": 8192,
        "llama.context_length": 8192,
        "llama.attention.head_count": 64,
        "llama.attention.head_count_kv": 8,
    }
    assert Sizing(architecture=architecture_of_gguf(dense), dtype="bfloat16").token_bytes == 327_680
    latent = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 61,
        "deepseek2.attention.head_count": 128,
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
    }
    assert Sizing(architecture=architecture_of_gguf(latent), dtype="bfloat16").token_bytes == 70_272
    hybrid = {
        "general.architecture": "jamba",
        "jamba.block_count": 8,
        "jamba.embedding_length": 4096,
        "jamba.attention.head_count": 32,
        "jamba.attention.head_count_kv": [0, 0, 0, 0, 8, 0, 0, 0],
        "jamba.ssm.state_size": 16,
        "jamba.ssm.conv_kernel": 4,
        "jamba.ssm.inner_size": 8192,
    }
    sizing = Sizing(architecture=architecture_of_gguf(hybrid), dtype="bfloat16")
    assert (sizing.token_bytes, sizing.state_bytes) == (4096, 7 * 155_648 * 2)
    with pytest.raises(ModelFileError, match=r"general\.architecture"):
        architecture_of_gguf({})
