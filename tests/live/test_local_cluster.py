"""A whole local cluster of real processes around the tripwire model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.cluster.live.cluster import LocalCluster, tripwire_settings
from anabranch.cluster.live.run_folder import read_state, supervisor_pid
from anabranch.cluster.live.survey import survey
from anabranch.cluster.local import arena_prefix
from anabranch.core.errors import ConfigError, Unavailable
from anabranch.core.live.process import is_alive

pytestmark = pytest.mark.cluster
ANABRANCH = [sys.executable, "-m", "anabranch"]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def chat(url: str, text: str) -> dict[str, Any]:
    body = {"model": "tripwire", "messages": [{"role": "user", "content": text}], "max_tokens": 4, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def leftovers(run_dir: Path, name: str) -> list[str]:
    prefix = Path(arena_prefix(str(run_dir), name, os.getuid(), "/dev/shm")).name
    return [name for name in os.listdir("/dev/shm") if name.startswith(prefix)]


def test_serves_survives_and_leaves_nothing(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    with LocalCluster(tripwire_settings(tmp_path), on_event=lambda *event: events.append(event)) as cluster:
        pids = [status.pid for status in cluster.statuses()]
        first = chat(cluster.url, "to be or not to be")
        assert survey(cluster.folder.path, "test").healthy
        assert set(cluster.census()) == {"directory", "prefill-0-node", "decode-0-node", "prefill-0", "decode-0"}
        with pytest.raises(ConfigError, match=rf"already running \(process {os.getpid()}\)"):
            LocalCluster(tripwire_settings(tmp_path)).start()
        dead = [cluster.kill(name) for name in ("directory", "decode-0-node", "prefill-0", "gateway")]
        cluster.wait_ready(timeout_s=60, but=dead)
        again = chat(cluster.url, "to be or not to be")
        assert again["choices"][0]["message"] == first["choices"][0]["message"]
        assert {name for name, text in events if "killed by SIGKILL" in text} == {
            "directory",
            "decode-0-node",
            "prefill-0",
            "gateway",
        }
        pids += [status.pid for status in cluster.statuses()]
        assert cluster.resident_bytes() > 0
    assert not any(is_alive(pid) for pid in pids)
    assert not (tmp_path / "run").exists()
    assert leftovers(tmp_path / "run", "test") == []
    with pytest.raises(Unavailable, match="no cluster named 'test'"):
        survey(tmp_path / "run", "test")


class Up:
    """`anabranch up` as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.config = folder / "anabranch.toml"
        self.config.write_text(
            f'[model]\nsource = "tripwire"\n[cluster]\nname = "up"\nprefill = 0\ndecode = 0\nboth = 1\n'
            f'run_dir = "{self.run_dir}"\ndata_dir = "{folder / "data"}"\n[gateway]\nport = 0\n'
            '[node]\ndram_bytes = "16MiB"\nssd_bytes = "16MiB"\n'
        )
        self.output = folder / "output"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*ANABRANCH, "up", "--config", str(self.config)], stdout=output, stderr=output
            )
        wait_for(lambda: self.ready() or self.ended())
        assert not self.ended(), self.output.read_text()
        return self.process

    def ready(self) -> bool:
        state = read_state(self.run_dir)
        mine = state is not None and self.process is not None and state.supervisor_pid == self.process.pid
        return mine and state is not None and all(child.state == "ready" for child in state.children)

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        argv = [*ANABRANCH, *words, "--config", str(self.config)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=120)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    if up.process is not None and up.process.poll() is None:
        up.process.kill()
        up.process.wait()


def test_up_status_and_down(up: Up) -> None:
    process = up.start()
    status = up.command("status", "--json")
    report = json.loads(status.stdout)
    assert status.returncode == 0
    assert {p["name"]: p["health"] for p in report["processes"]} == dict.fromkeys(
        ("directory", "both-0-node", "both-0", "gateway"), "ok"
    )
    assert report["resident_bytes"] > 0
    assert chat(report["url"], "hello")["usage"]["completion_tokens"] == 4
    second = up.command("up")
    assert second.returncode == 2
    assert f"error: a cluster named 'up' is already running (process {process.pid})" in second.stderr
    down = up.command("down")
    assert (down.returncode, down.stdout) == (0, f"stopped cluster 'up' (process {process.pid})\n")
    assert process.wait(60) == 0
    assert "curl http://127.0.0.1:" in up.output.read_text()
    assert up.command("status").returncode == 1
    assert up.command("down").returncode == 1


def test_a_killed_supervisor_takes_its_children_along_and_the_next_up_recovers(up: Up) -> None:
    kill_supervisor(up)
    assert leftovers(up.run_dir, "up"), "a killed cluster leaves its arenas"
    process = up.start()
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, up.output.read_text()
    assert not up.run_dir.exists()
    assert leftovers(up.run_dir, "up") == []


def test_down_cleans_up_after_a_killed_supervisor(up: Up) -> None:
    kill_supervisor(up)
    down = up.command("down")
    assert down.returncode == 0
    assert "removed what it had left behind" in down.stdout
    assert leftovers(up.run_dir, "up") == []


def kill_supervisor(up: Up) -> None:
    process = up.start()
    state = read_state(up.run_dir)
    assert state is not None
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_alive(child.pid) for child in state.children))
    assert supervisor_pid(up.run_dir) is None
