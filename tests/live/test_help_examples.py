"""The examples of `--help` run as they stand there (with the endpoint's address added)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from anabranch.cli.main import COMMANDS, load
from anabranch.cluster.live.cluster import LocalCluster, tripwire_settings

# What they need besides the command: `up` and `down` begin and end clusters, which other tests do.
OFFLINE = ("explain", "size", "config", "doctor")
SERVED = ("chat", "bench serve", "status")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def examples(name: str) -> str:
    """The shell lines of a command's examples."""
    group, _, sub = name.partition(" ")
    command = load(COMMANDS[group])
    if sub:
        assert isinstance(command, click.Group)
        command = command.commands[sub]
    text = "\n".join(part or "" for part in (command.help, command.epilog)).partition("Example")[2]
    inline = re.findall(r"`(anabranch [^`]+)`", text)
    return (
        inline[0] if inline else "\n".join(line for line in text.splitlines()[1:] if "anabranch" in line or ">" in line)
    )


@pytest.fixture
def shell(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with `anabranch` on the path."""
    script = tmp_path / "bin" / "anabranch"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m anabranch "$@"\n')
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return tmp_path, {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "100"}


def run(lines: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-ec", lines], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", OFFLINE)
def test_examples_that_need_no_server_run(name: str, shell: tuple[Path, dict[str, str]]) -> None:
    folder, environment = shell
    (folder / "Llama-3.1-70B").mkdir()
    (folder / "Llama-3.1-70B" / "config.json").write_text(json.dumps(LLAMA))
    lines = examples(name)
    assert "anabranch" in lines
    for line in [lines] if name == "explain" else lines.splitlines():
        done = run(line, folder, environment)
        # The doctor's verdict is about this machine.
        assert done.returncode in ((0, 1) if name == "doctor" else (0,)), f"{line}: {done.stderr}"
        assert done.stdout
        assert "error:" not in done.stderr


def test_examples_that_need_a_server_run(shell: tuple[Path, dict[str, str]]) -> None:
    folder, environment = shell
    with LocalCluster(tripwire_settings(folder)) as cluster:
        environment["ANABRANCH_CLUSTER_RUN_DIR"] = str(folder / "run")
        for name in SERVED:
            for line in examples(name).splitlines():
                if "--trace" in line:
                    continue  # whoever has no trace file takes the line above
                if name == "bench serve":
                    line += " --context 512"
                if name != "status":
                    line = line.replace(f"anabranch {name}", f"anabranch {name} --url {cluster.url}")
                done = run(
                    f"{line} </dev/null" if line.lstrip().startswith("anabranch chat") else line, folder, environment
                )
                assert done.returncode == 0, f"{line}: {done.stderr}{done.stdout}"
