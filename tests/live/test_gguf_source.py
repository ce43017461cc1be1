"""GGUF files: weights come out as in the Hugging Face directory that they were made from, tokenizers as llama.cpp's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.core.errors import ModelFileError
from anabranch.engine.live.model.gguf_source import GgufSource
from anabranch.engine.live.model.gguf_tokenizer import tokenizer_json
from anabranch.engine.live.prepare import hf_names, prepare

BYTES = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 else "" for b in range(256)]
_extra = iter(range(256, 512))
BYTES = [c or chr(next(_extra)) for c in BYTES]  # GPT-2's printable stand-ins for the 256 byte values


def write_gguf(path: Path, arch: str = "llama", pre: str = "smollm", model: str = "gpt2") -> dict[str, Any]:
    """A tiny model: returns its tensors under Hugging Face names, before llama.cpp's permutation."""
    import gguf

    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    tokens = ["<|end|>", *BYTES, "he", "12"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_token_merges(["h e", "1 2"])
    writer.add_eos_token_id(0)
    rng = np.random.default_rng(1)
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    kept: dict[str, Any] = {}
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32)
        kept[name] = weight
        heads = {"attn_q": 4, "attn_k": 2}.get(name)
        if heads and arch == "llama":
            halves = weight.reshape(heads, 2, shape[0] // heads // 2, shape[1])
            weight = halves.swapaxes(1, 2).reshape(shape)
        writer.add_tensor(f"blk.0.{name}.weight", weight)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(64, np.float32))
    writer.add_tensor("token_embd.weight", rng.normal(size=(len(tokens), 64)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return kept


def test_rotary_rows_are_put_back(tmp_path: Path) -> None:
    kept = write_gguf(tmp_path / "tiny.gguf")
    source = GgufSource(tmp_path / "tiny.gguf")
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")):
        np.testing.assert_array_equal(source.tensor(f"model.layers.0.self_attn.{ours}.weight"), kept[theirs])
    assert not source.unknown(hf_names(source.shape))
    assert source.shape.tied
    prepared = prepare(str(tmp_path / "tiny.gguf"), tmp_path / "cache")
    assert (prepared / "weights.safetensors").stat().st_size > 4 * 259 * 64


@pytest.mark.parametrize(
    ("arch", "pre", "model", "message"),
    [
        ("gemma", "smollm", "gpt2", "architecture gemma"),
        ("llama", "smollm", "llama", "tokenizer llama"),
        ("llama", "poro", "gpt2", "gpt2/poro"),
    ],
)
def test_unsupported_files_are_named(tmp_path: Path, arch: str, pre: str, model: str, message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", arch, pre, model)
    with pytest.raises(ModelFileError, match=message):
        prepare(str(tmp_path / "tiny.gguf"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "he 12", ["he", "Ġ", "1", "2"]),
        ("gpt-2", "he 12", ["he", "Ġ", "12"]),
        ("llama-bpe", "he12", ["he", "12"]),
        ("qwen2", "he12", ["he", "1", "2"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, expected: list[str]) -> None:
    from tokenizers import Tokenizer

    write_gguf(tmp_path / "tiny.gguf", pre=pre)
    source = GgufSource(tmp_path / "tiny.gguf")
    source.write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text).tokens == expected
    for sample in (text, "naïve Größe 日本語 مرحبا नमस्ते 🌊 \n\t<|end|>"):
        assert tokenizer.decode(tokenizer.encode(sample).ids, skip_special_tokens=False) == sample
    assert tokenizer.encode("<|end|>").ids == [0]


def test_a_beginning_token_is_added_where_the_file_says_so() -> None:
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<s>", "a"],
        "tokenizer.ggml.merges": ["a a"],
        "tokenizer.ggml.token_type": [3, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    made = tokenizer_json(lambda key, default: fields.get(key, default), "test")
    assert made["post_processor"]["special_tokens"]["<s>"]["ids"] == [0]
