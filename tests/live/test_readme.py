"""What README.md tells a reader to type is typed here: its commands and snippets are taken from it and run."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from anabranch.cluster.live.run_folder import read_state
from anabranch.cluster.live.survey import survey

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
URL = "http://127.0.0.1:8000"
MODEL = "SmolLM2-135M-Instruct"
# Words of the README that stand for something of the reader's.
STANDS_FOR = {"MODEL": "default", "A.json": "a.json", "B.json": "b.json"}


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands_of_table() -> list[str]:
    rows = re.findall(r"^\| (`anabranch .*?) \|", README, re.MULTILINE)
    return [command for row in rows for command in re.findall(r"`([^`]+)`", row)]


def ups() -> list[str]:
    return [line for block in fenced("bash") for line in block.splitlines() if line.startswith("anabranch up")]


class Reader:
    """Someone who has started the README's server, with the synthetic model under the real one's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.environment = {
            **os.environ,
            "ANABRANCH_MODEL_SOURCE": "tripwire",
            "ANABRANCH_MODEL_SERVED_NAME": MODEL,
            "ANABRANCH_CLUSTER_RUN_DIR": str(self.run_dir),
            "ANABRANCH_CLUSTER_DATA_DIR": str(folder / "data"),
            "ANABRANCH_NODE_DRAM_BYTES": "32MiB",
            "ANABRANCH_NODE_SSD_BYTES": "64MiB",
            "ANABRANCH_GATEWAY_PORT": "0",
            "ANABRANCH_GATEWAY_DRAIN_TIMEOUT_S": "5",
        }
        self.output = folder / "output"
        self.up: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "anabranch", "up"]
        with self.output.open("ab") as output:
            self.up = subprocess.Popen(argv, stdout=output, stderr=output, env=self.environment, cwd=self.folder)
        deadline = time.monotonic() + 90
        while not self._ready(self.up):
            assert self.up.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def _ready(self, up: subprocess.Popen[bytes]) -> bool:
        state = read_state(self.run_dir)
        if state is None or state.supervisor_pid != up.pid:
            return False
        return all(child.state == "ready" for child in state.children)

    @property
    def url(self) -> str:
        return survey(self.run_dir, "default").url

    def type(self, line: str, typed: str = "") -> str:
        """Run one `anabranch …` or `curl …` line; return what it prints."""
        words = shlex.split(line)
        if words[0] == "anabranch":
            words[:1] = [sys.executable, "-m", "anabranch"]
        done = subprocess.run(
            words, input=typed, capture_output=True, text=True, timeout=100, env=self.environment, cwd=self.folder
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def post(self, text: str) -> dict[str, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, "seed": 1}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def press_ctrl_c(self) -> None:
        assert self.up is not None
        self.up.send_signal(signal.SIGINT)
        assert self.up.wait(60) == 130, self.output.read_text()

    def leave(self) -> None:
        if self.up is not None and self.up.poll() is None:
            self.up.kill()
            self.up.wait()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    reader = Reader(tmp_path_factory.mktemp("reader"))
    for name, minute in (("a.json", "30"), ("b.json", "31")):
        (reader.folder / name).write_text(json.dumps({"prompt": f"Now: 09:{minute}. You are a helpful agent."}))
    reader.start()
    yield reader
    reader.leave()


def test_the_curl_command_is_answered(reader: Reader) -> None:
    (curl,) = [block for block in fenced("bash") if block.startswith("curl")]
    assert f"{URL}/" in curl
    answer = json.loads(reader.type(curl.replace(URL, reader.url).replace("\\\n", " ")))
    usage = answer["usage"]
    assert answer["model"] == MODEL
    assert sum(usage["anabranch"].values()) == usage["prompt_tokens"]
    (shown,) = re.findall(r"`(\{\"computed\".*?\})`", README)
    assert set(json.loads(shown)) == set(usage["anabranch"])


def test_the_python_snippet_prints_an_answer(reader: Reader) -> None:
    (snippet,) = fenced("python")
    assert f"{URL}/" in snippet
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(snippet.replace(URL, reader.url), "README.md", "exec"), names)  # noqa: S102
    names["client"].close()
    assert "prompt_tokens_details" in printed.getvalue()
    assert names["answer"].usage.prompt_tokens_details.cached_tokens > 0, "the curl command asked the same"


@pytest.mark.parametrize("command", [command for command in commands_of_table() if "down" not in command])
def test_a_command_of_the_table_runs(reader: Reader, command: str) -> None:
    words = [STANDS_FOR.get(word, word) for word in command.split()]
    typed = ""
    if words[1] == "chat":
        words += ["--url", reader.url, "--max-tokens", "4"]
        typed = "Hello\n"
    if words[1] == "bench":
        words += ["--url", reader.url, "--sessions", "2", "--turns", "2", "--context", "512", "--max-tokens", "2"]
    assert reader.type(shlex.join(words), typed)


def test_after_ctrl_c_and_a_new_start_the_conversation_is_warm(reader: Reader) -> None:
    text = "a story of a river that parts and meets itself again further down"
    cold = reader.post(text)
    reader.press_ctrl_c()
    reader.start()
    warm = reader.post(text)
    assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
    assert warm["usage"]["anabranch"]["ssd"] > 0


def test_down_stops_it(reader: Reader) -> None:
    assert "anabranch down" in commands_of_table()
    assert "stopped" in reader.type("anabranch down")
    assert reader.up is not None
    assert reader.up.wait(60) == 0


@pytest.mark.parametrize("line", ups())
def test_the_flags_of_other_shapes_exist(reader: Reader, line: str) -> None:
    """`anabranch config` takes the flags of `up` and refuses what `up` would refuse."""
    reader.type(shlex.join(shlex.split(line.replace("anabranch up", "anabranch config"), comments=True)))


def test_every_file_and_target_that_is_named_exists() -> None:
    links = re.findall(r"\]\(([^)]+)\)", README)
    scripts = re.findall(r"benchmarks/\w+\.py", README)
    assert [path for path in links + scripts if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make (\w+)", README, re.MULTILINE))
    assert targets >= {"run", "test", "lint", "bench", "help"}
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
