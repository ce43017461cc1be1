"""A GGUF file as a source of weights: metadata and tensors under their Hugging Face names.

llama.cpp stores q and k of the "llama" architecture with rotary pairs interleaved; `tensor` puts them back.
See also `gguf_tokenizer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from anabranch.core.errors import MissingExtra, ModelFileError
from anabranch.engine.live.model.gguf_tokenizer import tokenizer_config, tokenizer_json
from anabranch.engine.live.model.rope import inverse_frequencies
from anabranch.engine.live.model.weight_file import Array
from anabranch.engine.live.model_files import (
    ARCHITECTURES,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ModelShape,
    parse_shape,
)

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufSource:
    """Raises ModelFileError if the file is damaged or its architecture is not supported."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise MissingExtra("engine", "gguf") from error
        try:
            self._reader = GGUFReader(str(path))
        except (OSError, ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise ModelFileError(f"cannot read {path} as GGUF ({error}); copy the file again") from error
        self._path = path
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._arch = str(self._field("general.architecture", ""))
        if self._arch not in ARCHITECTURES:
            supported = ", ".join(ARCHITECTURES)
            raise ModelFileError(f"{path}: architecture {self._arch} is not supported; supported are {supported}")
        self.name = path.stem.rsplit(".", 1)[0]
        self.config = self._config()
        self.shape: ModelShape = parse_shape(self.config, str(path))

    @property
    def inv_freq(self) -> Array:
        """GGUF keeps Llama 3's scaling as one divisor per frequency."""
        base = inverse_frequencies(self.shape.head_dim, self.shape.rope_theta, None, str(self._path))
        if "rope_freqs.weight" not in self._tensors:
            return base
        return (base / self._dequantized("rope_freqs.weight").reshape(-1)).astype(np.float32)

    def tensor(self, name: str) -> Array:
        """float32, by Hugging Face name."""
        weight = self._dequantized(self._gguf_name(name))
        if self._arch == "llama" and ".q_proj." in name:
            return _rotary_halves(weight, self.shape.heads)
        if self._arch == "llama" and ".k_proj." in name:
            return _rotary_halves(weight, self.shape.kv_heads)
        return weight

    def unknown(self, expected: set[str]) -> list[str]:
        known = {self._gguf_name(name) for name in expected} | {"rope_freqs.weight"}
        return sorted(name for name in self._tensors if name not in known)

    def write_tokenizer(self, target: Path) -> None:
        (target / TOKENIZER_FILE).write_bytes(msgspec.json.encode(tokenizer_json(self._field, str(self._path))))
        (target / TOKENIZER_CONFIG_FILE).write_bytes(msgspec.json.encode(tokenizer_config(self._field)))

    def _gguf_name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in _TOP:
            return f"{_TOP[stem]}.{kind}"
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_LAYER[part]}.{kind}"

    def _dequantized(self, name: str) -> Array:
        from gguf import dequantize

        if name not in self._tensors:
            raise ModelFileError(f"{self._path} has no tensor {name}; copy the file again")
        tensor = self._tensors[name]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        try:
            return np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        except NotImplementedError as error:
            raise ModelFileError(f"{self._path}: quantization {tensor.tensor_type.name} is not supported") from error

    def _field(self, key: str, default: Any) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def _config(self) -> dict[str, Any]:
        arch = self._arch
        if self._field(f"{arch}.rope.scaling.type", "none") not in ("none", ""):
            raise ModelFileError(f"{self._path}: its rope scaling is not supported; use the Hugging Face directory")

        def number(key: str, default: Any = None) -> Any:
            value = self._field(f"{arch}.{key}", default)
            if value is None:
                raise ModelFileError(f"{self._path} lacks the field {arch}.{key}; copy the file again")
            return value

        heads, hidden = number("attention.head_count"), number("embedding_length")
        return {
            "architectures": [ARCHITECTURES[arch]],
            "model_type": arch,
            "hidden_size": hidden,
            "intermediate_size": number("feed_forward_length"),
            "num_hidden_layers": number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": number("attention.head_count_kv", heads),
            "head_dim": number("attention.key_length", hidden // heads),
            "vocab_size": len(self._field("tokenizer.ggml.tokens", [])),
            "max_position_embeddings": number("context_length"),
            "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_theta": number("rope.freq_base", 10000.0),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", None),
        }


def _rotary_halves(weight: Array, heads: int) -> Array:
    """Rows (pair 0 first, pair 0 second, pair 1 first, …) → (all firsts, all seconds), per head."""
    half = weight.shape[0] // heads // 2
    grouped = weight.reshape(heads, half, 2, *weight.shape[1:])
    return grouped.swapaxes(1, 2).reshape(weight.shape)
