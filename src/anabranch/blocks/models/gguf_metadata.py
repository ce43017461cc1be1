"""Metadata of a GGUF file → Architecture, by way of the config.json fields that say the same."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.blocks.models.architecture import Architecture
from anabranch.blocks.models.config_json import architecture_of
from anabranch.core.errors import ModelFileError

SAME_MEANING = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "v_head_dim",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.sliding_window": "sliding_window",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "ssm.state_size": "mamba_d_state",
    "ssm.conv_kernel": "mamba_d_conv",
    "full_attention_interval": "full_attention_interval",
}
NAMED_ALIKE = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gpt-oss": "gpt_oss", "qwen3next": "qwen3_next"}


def architecture_of_gguf(metadata: Mapping[str, object], where: str = "GGUF file") -> Architecture:
    """`metadata`: all scalar and list values of the file's header. Raises ModelFileError."""
    family = metadata.get("general.architecture")
    if not isinstance(family, str):
        raise ModelFileError(f"{where}: no general.architecture in the metadata")
    known = {name: metadata.get(f"{family}.{name}") for name in SAME_MEANING}
    config: dict[str, object] = {SAME_MEANING[name]: value for name, value in known.items() if value is not None}
    config["model_type"] = NAMED_ALIKE.get(family, family)
    _per_layer_heads(config, metadata.get(f"{family}.attention.head_count_kv"))
    if "kv_lora_rank" in config:
        config["qk_rope_head_dim"] = metadata.get(f"{family}.rope.dimension_count")
    inner, width = metadata.get(f"{family}.ssm.inner_size"), config.get("hidden_size")
    if isinstance(inner, int) and isinstance(width, int) and width and inner % width == 0:
        config["mamba_expand"] = inner // width
    return architecture_of(config, where)


def _per_layer_heads(config: dict[str, object], heads: object) -> None:
    """Hybrids list a count per layer; 0 marks a layer without attention."""
    if not isinstance(heads, list):
        config["num_key_value_heads"] = heads
        return
    attending = [count for count in heads if count]
    if len(attending) == len(heads) or "mamba_d_state" not in config:
        config["num_key_value_heads"] = heads
        return
    config["num_key_value_heads"] = max(attending, default=0)
    config["layer_types"] = ["full_attention" if count else "mamba" for count in heads]
