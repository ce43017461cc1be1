"""Small random models of every supported family against transformers, and the sources that must be refused."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from runner_driver import GREEDY, Driver, transformers_model

from anabranch.core.errors import ModelFileError
from anabranch.engine.live.model.step import build_step
from anabranch.engine.live.model_files import load_model_info, load_shape, read_json
from anabranch.engine.live.prepare import prepare
from anabranch.engine.runner import Chunk, OpenGate

SMALL: dict[str, Any] = {
    "vocab_size": 203,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 700,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama-scaled": ("llama", {"rope_theta": 5000.0, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama-untied": ("llama", {"head_dim": 48, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}


def save(directory: Path, family: str, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    """A random model as transformers saves it, with a tokenizer."""
    kind, changes = FAMILIES[family]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SMALL, **changes}))
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.1)
            else:
                torch.nn.init.normal_(parameter, std=0.15)
        model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_bytes(msgspec.json.encode(TOKENIZER))
    (directory / "tokenizer_config.json").write_bytes(b'{"eos_token": "b"}')
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_equal_transformers(tmp_path: Path, model_cache: Path, family: str, kernels: str) -> None:
    prepared = prepare(str(save(tmp_path / "tiny-model", family)), model_cache)
    shape = load_shape(prepared)
    tokens = [(i * i * 31 + 7 * i) % shape.vocab for i in range(600)]
    driver = Driver(prepared, 60, kernels=kernels)
    pages = driver.pages(600)
    driver.feed(tokens[:500], pages, chunk=123)
    chunk = Chunk(seq=0, tokens=tokens[500:], start=500, pages=pages, sample=1, params=GREEDY)
    step = build_step([chunk], shape, 16, 60)
    ours = driver.runner._layers.forward(step, OpenGate())[0].clone()
    driver.close()
    with torch.inference_mode():
        theirs = transformers_model(prepared)(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    shutil.rmtree(prepared)


def test_shards_half_precision_and_chat_template(tmp_path: Path) -> None:
    """A sharded bfloat16 directory gives exactly the values that it stores."""
    source = save(tmp_path / "sharded", "qwen2", torch.bfloat16, "60KB")
    assert (source / "model.safetensors.index.json").is_file()
    stages: list[tuple[str, float]] = []
    prepared = prepare(str(source), tmp_path / "cache", progress=lambda stage, done: stages.append((stage, done)))
    assert stages[0] == ("reading", 0.0)
    assert stages[-1] == ("ready", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM

        original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    for name, tensor in transformers_model(prepared).state_dict().items():
        assert torch.equal(tensor, original[name]), name
    assert read_json(prepared / "tokenizer_config.json")["chat_template"] == "{{ messages[0].content }}"
    assert load_model_info(prepared).eos_token_ids == (7,)


def test_preparing_again_is_free_and_changes_are_noticed(tmp_path: Path) -> None:
    source, cache = save(tmp_path / "model", "qwen3"), tmp_path / "cache"
    first = prepare(str(source), cache)
    stamp = (first / "weights.safetensors").stat().st_mtime_ns
    (cache / f".{first.name}.making").mkdir()  # what a crash leaves behind
    assert prepare(str(source), cache) == first
    assert prepare(str(first), cache) == first
    assert (first / "weights.safetensors").stat().st_mtime_ns == stamp
    config = read_json(source / "config.json")
    (source / "config.json").write_bytes(msgspec.json.encode({**config, "rms_norm_eps": 1e-3}))
    second = prepare(str(source), cache)
    assert second != first
    assert load_model_info(second).digest != load_model_info(first).digest


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama-untied")
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="truncated"):
        prepare(str(source), tmp_path / "cache")
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}, "architecture GemmaForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "layers.1"),
        ({"intermediate_size": 112}, "shape"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "yarn"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"hidden_size": None}, "copy config.json"),
    ],
)
def test_unsupported_models_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = save(tmp_path / "model", "llama-untied")
    config = read_json(source / "config.json")
    (source / "config.json").write_bytes(msgspec.json.encode({**config, **change}))
    with pytest.raises(ModelFileError, match=message):
        prepare(str(source), tmp_path / "cache")


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama-untied")
    (source / "tokenizer.json").rename(source / "kept")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        prepare(str(source), tmp_path / "cache")
    (source / "kept").rename(source / "tokenizer.json")
    (source / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        prepare(str(source), tmp_path / "cache")
    damaged = tmp_path / "model.gguf"
    damaged.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(ModelFileError, match="GGUF"):
        prepare(str(damaged), tmp_path / "cache")
    for wrong in (str(tmp_path / "nowhere"), str(source / "config.json")):
        with pytest.raises(ModelFileError):
            prepare(wrong, tmp_path / "cache")
    with pytest.raises(ModelFileError, match=r"anabranch\.json"):
        load_model_info(source)
