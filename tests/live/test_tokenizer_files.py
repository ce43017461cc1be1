"""Prepared tokenizer files: chat templates, pieces of tokens, and agreement with the tokenizer's own decoder."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerFile
from tokenizers import decoders, models, pre_tokenizers

from anabranch.core.errors import ConfigError, ModelFileError, RequestError
from anabranch.serving.live.server import sampling_defaults
from anabranch.serving.live.tokenizer import NumberedTokenizer, PreparedTokenizer
from anabranch.serving.openai import SamplingDefaults

TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
HI = [{"role": "user", "content": " hi "}]


def now() -> datetime:
    return datetime(2024, 2, 29, tzinfo=UTC)


def directory(path: Path, template: Any = TEMPLATE) -> Path:
    """A byte-level vocabulary with a few merges and special tokens, as files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    for pair in ("he", "ll", "ðŁ"):
        vocab[pair] = len(vocab)
    tokenizer = TokenizerFile(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("ð", "Ł")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer.add_tokens(["plain added"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "chat_template": template, "unk_token": None}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedTokenizer:
    return PreparedTokenizer(directory(tmp_path_factory.mktemp("model")), now)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text(max_size=40))
def test_text_round_trips(prepared: PreparedTokenizer, text: str) -> None:
    text = text.encode(errors="replace").decode()
    detokenizer = prepared.detokenizer()
    tokens = prepared.encode(text)
    assert "".join([detokenizer.push(token) for token in tokens] + [detokenizer.finish()]) == text
    assert b"".join(map(prepared.token_bytes, tokens)) == text.encode()


def test_special_tokens_are_silent_and_others_are_not(prepared: PreparedTokenizer) -> None:
    tokens = prepared.encode("<|user|>hello😀 plain added<|end|>")
    detokenizer = prepared.detokenizer()
    assert "".join(map(detokenizer.push, tokens)) == "hello😀 plain added"
    assert b"".join(map(prepared.token_bytes, tokens)).startswith(b"<|user|>")
    assert prepared.token_bytes(10**6) == b""


def test_the_chat_template(prepared: PreparedTokenizer) -> None:
    assert prepared.render(HI) == "<s><|user|>hi<|end|><|assistant|>"
    with pytest.raises(RequestError, match="no tools here"):
        prepared.render([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": "d"}], "d"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        ("{% for m in messages %}{% break %}{% endfor %}{{ {'é': 1} | tojson }}", '{"é": 1}'),
    ],
)
def test_what_templates_may_use(tmp_path: Path, template: Any, expected: str) -> None:
    assert PreparedTokenizer(directory(tmp_path, template), now).render(HI) == expected


def test_a_template_of_its_own_file_wins(tmp_path: Path) -> None:
    directory(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert PreparedTokenizer(tmp_path, now).render(HI) == "from a file"


@pytest.mark.parametrize("template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 + 'a' }}"])
def test_a_template_cannot_break_out(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        PreparedTokenizer(directory(tmp_path, template), now).render(HI)


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="/v1/completions"):
        PreparedTokenizer(directory(tmp_path, None), now).render(HI)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        PreparedTokenizer(tmp_path, now)
    directory(tmp_path, "{% if %}")
    with pytest.raises(ModelFileError, match="chat template"):
        PreparedTokenizer(tmp_path, now)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json"):
        PreparedTokenizer(tmp_path, now)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match="prepare the model again"):
        PreparedTokenizer(tmp_path, now)


def test_a_metaspace_vocabulary_with_byte_fallback(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁hello": 1, "<0xC3>": 2, "<0xA9>": 3, "▁": 4}
    tokenizer = TokenizerFile(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    detokenizer = PreparedTokenizer(tmp_path, now).detokenizer()
    assert [detokenizer.push(token) for token in (1, 2, 3, 4)] == [" hello", "", "é", " "]


def test_the_stand_in() -> None:
    stand_in = NumberedTokenizer(5000)
    assert stand_in.encode("a⟨300⟩⟨9999⟩") == [97, 300, *"⟨9999⟩".encode()]
    assert stand_in.token_bytes(300) == "⟨300⟩".encode()
    assert stand_in.token_bytes(97) == b"a"
    assert stand_in.render(HI) == "user:  hi \nassistant: "
    with pytest.raises(ConfigError, match="at least 256"):
        NumberedTokenizer(100)


def test_the_model_s_own_sampling_is_read_from_its_files(tmp_path: Path) -> None:
    assert sampling_defaults("") == sampling_defaults(str(tmp_path)) == SamplingDefaults()
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": null, "eos_token_id": [1, 2]}')
    assert sampling_defaults(str(tmp_path)) == SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20)
    file.write_text('{"temperature": 7}')
    with pytest.raises(ModelFileError, match=r"generation_config\.json.*temperature"):
        sampling_defaults(str(tmp_path))
