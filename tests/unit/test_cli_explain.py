from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.cli.explain import explain
from anabranch.core.errors import InvalidInput, ModelFileError
from anabranch.serving.live.token_offsets import find_prepared, load_offsets

NOW = datetime(2026, 12, 1)
RULES = "Answer briefly and never guess. " * 12


@pytest.fixture(autouse=True)
def _no_prepared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prompts(tmp_path: Path) -> list[str]:
    paths = []
    for name, minute in (("a", 30), ("b", 31)):
        path = tmp_path / f"{name}.json"
        system = {"role": "system", "content": f"Now: 2026-12-01 09:{minute}. {RULES}"}
        path.write_text(json.dumps({"messages": [system, {"role": "user", "content": "hi"}]}))
        paths.append(str(path))
    return paths


def small_tokenizer(directory: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    directory.mkdir(parents=True)
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "Now": 1}, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def test_a_timestamp_is_found_and_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(explain, prompts(tmp_path))
    assert result.exit_code == 0, result.output
    for words in (
        "in messages[0] (system), character 20",
        "(timestamp)",
        "in the system prompt",
        "to compute",
        "estimated",
    ):
        assert words in result.output
    assert "tokens are the same again" in result.output


def test_json(tmp_path: Path) -> None:
    a, b = prompts(tmp_path)
    report = json.loads(CliRunner().invoke(explain, [a, b, "--json", "--block-tokens", "8"]).output)
    assert report["cause"]["name"] == "timestamp"
    assert report["tokenizer"] == "estimate"
    assert report["parting"]["block_tokens"] == 8
    assert 80 < report["lost_percent"] <= 100
    same = json.loads(CliRunner().invoke(explain, [a, a, "--json"]).output)
    assert (same["cause"]["name"], same["lost_percent"], same["cause"]["harmless"]) == ("identical", 0.0, True)


def test_one_prompt_from_stdin(tmp_path: Path) -> None:
    a, b = prompts(tmp_path)
    result = CliRunner().invoke(explain, [a, "-"], input=Path(b).read_text())
    assert "(timestamp)" in result.output
    assert isinstance(CliRunner().invoke(explain, ["-", "-"]).exception, InvalidInput)


def test_errors_name_the_file(tmp_path: Path) -> None:
    a, _ = prompts(tmp_path)
    result = CliRunner().invoke(explain, [a, str(tmp_path / "none.json")])
    assert isinstance(result.exception, InvalidInput)
    assert "none.json" in str(result.exception)
    result = CliRunner().invoke(explain, [a, a, "--model", str(tmp_path)])
    assert isinstance(result.exception, ModelFileError)


def test_the_prepared_models_own_tokenizer_and_template_are_used(tmp_path: Path) -> None:
    directory = small_tokenizer(tmp_path / "cache" / "anabranch" / "models" / "tiny-1")
    assert find_prepared(directory.parent) == directory
    report = json.loads(CliRunner().invoke(explain, [*prompts(tmp_path), "--json"]).output)
    assert report["tokenizer"] == str(directory)
    # Every word but "Now" is unknown to this vocabulary: the minutes do not differ.
    assert report["cause"]["name"] == "identical"
    tokenize, render = load_offsets(directory, NOW)
    assert [token[1:] for token in tokenize("Now what")] == [(0, 3), (4, 8)]
    assert render is not None
    assert render([{"role": "user", "content": " x "}]) == "[user] x "


def test_a_broken_tokenizer_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFileError, match="not a tokenizer"):
        load_offsets(tmp_path, NOW)


def test_help_has_an_example() -> None:
    assert "anabranch explain a.json b.json" in CliRunner().invoke(explain, ["--help"]).output
