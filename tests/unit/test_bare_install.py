"""Commands that need no optional package work, and those that do say which, when none is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from anabranch.cli.errors import EXTRAS

SCRIPT = """
import sys
for name in {hidden!r}:
    sys.modules[name] = None
from anabranch.cli.main import main
sys.argv = {arguments!r}
main()
"""


def run(*arguments: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(hidden=list(EXTRAS), arguments=["anabranch", *arguments])
    env = {**os.environ, **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=env)


def test_size_explain_and_doctor_need_no_extra() -> None:
    assert "46,080 B" in run("size", "default").stdout
    assert "Example" in run("explain", "--help").stdout
    assert "C compiler" in run("doctor").stdout


def test_explain_estimates_where_the_tokenizer_library_is_missing(tmp_path: Path) -> None:
    prepared = tmp_path / "anabranch" / "models" / "tiny"
    prepared.mkdir(parents=True)
    (prepared / "tokenizer.json").write_text("{}")
    prompt = tmp_path / "a.txt"
    prompt.write_text("some text")
    assert "estimated" in run("explain", str(prompt), str(prompt), cache=tmp_path).stdout
    result = run("explain", str(prompt), str(prompt), "--model", str(prepared), cache=tmp_path)
    assert "pip install 'anabranch[serve]'" in result.stderr


def test_chat_names_its_extra() -> None:
    result = run("chat")
    assert result.returncode == 2
    assert "pip install 'anabranch[serve]'" in result.stderr
