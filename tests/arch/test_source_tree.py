"""Rules of the house that a linter does not know."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "anabranch"
FILES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_a_file_stays_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600, "split it: 150 lines is normal, 400 a question"


def test_no_pickle_no_assert_for_input_no_silent_except() -> None:
    forbidden = re.compile(r"^\s*(import pickle|from pickle|assert )|except[^:]*:\s*pass\s*$")
    hits = [
        f"{path.relative_to(SRC)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line)
    ]
    assert hits == []


def test_no_vague_names() -> None:
    vague = {"utils", "common", "helpers", "manager", "misc"}
    assert [str(p.relative_to(SRC)) for p in FILES if p.stem in vague or p.parent.name in vague] == []


def test_core_works_without_any_extra() -> None:
    """`anabranch --help` and every pure package import with all optional dependencies missing."""
    code = """
import sys
class Block:
    names = {"torch", "numpy", "starlette", "uvicorn", "httpx", "prometheus_client", "tokenizers", "jinja2", "gguf",
             "safetensors", "openai", "transformers"}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import importlib, pkgutil, anabranch
for module in pkgutil.walk_packages(anabranch.__path__, "anabranch."):
    if ".live" not in module.name and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from click.testing import CliRunner
from anabranch.cli.main import cli
result = CliRunner().invoke(cli, ["--help"])
sys.exit(result.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
