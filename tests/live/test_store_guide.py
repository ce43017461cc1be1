"""What docs/store.md and README.md tell someone with a script to type is typed here."""

from __future__ import annotations

import io
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from anabranch.cluster.live.cluster import free_port

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "store.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def moved(text: str, ports: dict[str, int]) -> str:
    for port, other in ports.items():
        text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
    return text.replace("1GiB", "64MiB").replace("4GiB", "64MiB")


@contextmanager
def typed(lines: list[str], folder: Path) -> Iterator[None]:
    """Each `anabranch …` line in a terminal of its own, until it says that it is ready."""
    running = []
    try:
        for line in lines:
            command = [sys.executable, "-m", *shlex.split(line)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, text=True))
            assert running[-1].stdout is not None
            assert "ready at" in running[-1].stdout.readline()
        yield
        for process in reversed(running):
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
    finally:
        for process in running:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.mark.parametrize("block", range(2))
def test_the_guide_works_as_printed(block: int, tmp_path: Path) -> None:
    ports = {port: free_port("127.0.0.1") for port in ("7060", "7070", "7071")}
    lines = moved(fenced("bash")[block], ports).strip().splitlines()
    if "--data-dir" not in lines[0] and len(lines) == 1:
        lines[0] += " --data-dir ./alone"
    (snippet,) = fenced("python")
    printed = io.StringIO()
    with typed(lines, tmp_path), redirect_stdout(printed):
        exec(compile(moved(snippet, ports), "store.md", "exec"), {})  # noqa: S102
    assert printed.getvalue().splitlines() == ["ok", "b'forty-two'", "8", "28"]
