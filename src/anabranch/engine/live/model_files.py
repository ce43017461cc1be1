"""The prepared directory: what every process of a cluster knows about a model, readable without torch.

**Covers** the description of a supported model (`ModelShape`), checking a Hugging Face style configuration, and
`load_model_info`. **Does not cover** making the directory (`prepare`) or its tensors (`model.weight_file`).

    config.json             Hugging Face style configuration
    weights.safetensors     float32, packed for the runner (`model.weight_file`)
    tokenizer.json          `tokenizers` format
    tokenizer_config.json   special tokens and chat template
    anabranch.json          name, source, digest
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from anabranch.blocks.layout import Dtype, KvLayout
from anabranch.core.errors import ModelFileError
from anabranch.engine.runner import ModelInfo

FORMAT = 2
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
MANIFEST_FILE = "anabranch.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`digest`: hex BLAKE3 over configuration and weights; any change of either changes it."""

    name: str
    source: str
    digest: str
    format: int = FORMAT


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of a decoder of the Llama family. `qkv_bias`/`qk_norm` tell Qwen2 and Qwen3 from Llama."""

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_tokens: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def cost_context(self) -> float:
        """Context at which attention (4·heads·head_dim flops per position) costs as much as the linear layers."""
        linear = self.hidden * (2 * self.q_size + 2 * self.kv_size + 3 * self.intermediate)
        return linear / (2 * self.q_size)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelFileError if the file is missing or not a JSON object."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"cannot read {path}: {error.strerror}; is {path.parent} a complete model?") from error
    except msgspec.DecodeError as error:
        raise ModelFileError(f"{path} is not valid JSON ({error}); copy the file again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object; copy the file again")
    return value


def parse_shape(config: dict[str, Any], where: str) -> ModelShape:
    """Check a Hugging Face configuration. Raises ModelFileError naming the architecture or the offending field."""
    model_type = config.get("model_type")
    named = (config.get("architectures") or [model_type])[0]
    if model_type not in ARCHITECTURES or named not in (ARCHITECTURES[model_type], model_type):
        supported = ", ".join(ARCHITECTURES.values())
        raise ModelFileError(f"{where}: architecture {named} is not supported; supported are {supported}")
    _refuse_variants(config, where)
    try:
        shape = _shape(config, str(model_type))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFileError(f"{where}: missing or wrong field {error}; copy config.json again") from error
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise ModelFileError(f"{where}: {shape.heads} heads, {shape.kv_heads} K/V heads of {shape.head_dim} do not fit")
    return shape


def _shape(config: dict[str, Any], model_type: str) -> ModelShape:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return ModelShape(
        model_type=model_type,
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        context_tokens=int(config["max_position_embeddings"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=model_type == "qwen3",
        rope_theta=theta,
        rope_scaling=None if kind == "default" else rope,
    )


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"{where}: activation {config['hidden_act']} is not supported; supported is silu")
    if config.get("quantization_config"):
        raise ModelFileError(
            f"{where}: quantized weights are not supported; use the bf16, f16 or f32 weights, or a GGUF"
        )
    if config.get("use_sliding_window"):
        raise ModelFileError(f"{where}: sliding-window attention is not supported; choose a model without it")
    if float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelFileError(f"{where}: partial_rotary_factor other than 1 is not supported")
    if int(config.get("intermediate_size", 0)) % 16:
        raise ModelFileError(f"{where}: intermediate_size must be a multiple of 16, got {config['intermediate_size']}")


def eos_ids(config: dict[str, Any]) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list) else (int(value),)


def read_manifest(prepared: Path) -> Manifest:
    """Raises ModelFileError when `prepared` is not a prepared directory of this version."""
    try:
        manifest = msgspec.convert(read_json(prepared / MANIFEST_FILE), Manifest)
    except msgspec.ValidationError as error:
        raise ModelFileError(
            f"{prepared / MANIFEST_FILE} is damaged ({error}); delete {prepared} and prepare again"
        ) from error
    if manifest.format != FORMAT:
        raise ModelFileError(f"{prepared} was prepared by another version; delete it and prepare again")
    return manifest


def load_shape(prepared: Path) -> ModelShape:
    return parse_shape(read_json(prepared / CONFIG_FILE), str(prepared))


def layout_of(shape: ModelShape, kv_dtype: Dtype, block_tokens: int) -> KvLayout:
    return KvLayout(
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_tokens=block_tokens,
        dtype=kv_dtype,
    )


def load_model_info(prepared: Path, kv_dtype: Dtype = "float32", block_tokens: int = 16) -> ModelInfo:
    """What the rest of the system needs to know, without torch and without reading the weights.

    Raises ModelFileError if the directory is incomplete, ConfigError if the layout is impossible.
    """
    manifest = read_manifest(prepared)
    config = read_json(prepared / CONFIG_FILE)
    shape = parse_shape(config, str(prepared))
    return ModelInfo(
        name=manifest.name,
        layout=layout_of(shape, kv_dtype, block_tokens),
        context_tokens=shape.context_tokens,
        vocab=shape.vocab,
        eos_token_ids=eos_ids(config),
        digest=bytes.fromhex(manifest.digest),
        cost_context=shape.cost_context,
    )
