from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.cli.size import read_architecture, size
from anabranch.core.errors import ModelFileError


def test_default_as_json() -> None:
    result = CliRunner().invoke(size, ["default", "--memory", "512MiB", "--concurrency", "8", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.output)
    assert report["token_bytes"] == 46_080
    assert report["full_block_bytes"] == 737_280
    assert report["context"] == 8192
    assert report["fits"] == 1
    assert report["longest"] == 1456


def test_table_names_every_figure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "mistral",
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "head_dim": 16,
                "num_key_value_heads": 2,
                "sliding_window": 64,
                "max_position_embeddings": 1024,
            }
        )
    )
    result = CliRunner().invoke(size, [str(tmp_path), "--memory", "1GiB", "--concurrency", "2", "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    for words in ("GQA", "sliding window", "beyond the window", "Layer Block", "any length", "kept whole in a store"):
        assert words in result.output


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "not a readable config.json"), ("{}", "looked for num_hidden_layers"), (None, "no such file")],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelFileError) as caught:
        read_architecture(str(path))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(ModelFileError, match="GGUF"):
        read_architecture(str(path))


def test_help_has_an_example() -> None:
    assert "anabranch size default --memory" in CliRunner().invoke(size, ["--help"]).output


def test_bad_bytes_are_refused() -> None:
    result = CliRunner().invoke(size, ["default", "--memory", "lots"])
    assert result.exit_code == 2
    assert "not a number with a unit" in result.output
