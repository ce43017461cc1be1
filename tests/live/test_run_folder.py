"""The run folder: one owner at a time, recovery after a kill, nothing left behind; and what fits on this machine."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from anabranch.cluster.live.capacity import busy_port, disk_room, fit
from anabranch.cluster.live.child import ChildStatus
from anabranch.cluster.live.cluster import LocalCluster, tripwire_settings
from anabranch.cluster.live.run_folder import RunFolder, RunState, private_folder, read_state, supervisor_pid
from anabranch.cluster.local import SPEC_FILE, STATE_FILE, arena_prefix
from anabranch.cluster.settings import SECTIONS, Settings, settings_of
from anabranch.core.config import Resolved
from anabranch.core.errors import ConfigError, MissingExtra
from anabranch.core.live.environment import gather
from anabranch.core.live.process import is_alive

OWNER = """
import sys
from pathlib import Path
from anabranch.cluster.live.run_folder import RunFolder
RunFolder(Path(sys.argv[1]), "x").acquire()
print("locked", flush=True)
sys.stdin.read()
"""


def state(*children: ChildStatus) -> RunState:
    return RunState(name="x", supervisor_pid=1, url="", children=list(children))


def test_a_second_owner_is_refused_naming_the_first(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        assert supervisor_pid(tmp_path / "run") == owner.pid
        with pytest.raises(ConfigError, match=rf"'x' is already running \(process {owner.pid}\)"):
            RunFolder(tmp_path / "run", "x").acquire()
        owner.kill()
    # The lock died with its owner, although its file is still there.
    folder = RunFolder(tmp_path / "run", "x")
    folder.acquire()
    assert supervisor_pid(tmp_path / "run") == os.getpid()
    folder.release()


def test_release_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    folder = RunFolder(path, "x")
    folder.acquire()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    spec = folder.write(STATE_FILE, state())
    assert stat.S_IMODE(spec.stat().st_mode) == 0o600
    (path / "engine.sock").touch()
    (path / "logs" / "engine.log").touch()
    arena = Path(arena_prefix(str(path), "x", os.getuid(), "/dev/shm") + "prefill-0")
    arena.write_bytes(b"bytes")
    folder.release()
    folder.release()
    assert not path.exists()
    assert not arena.exists()
    assert supervisor_pid(path) is None


def test_logs_can_be_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "x")
    folder.acquire()
    (tmp_path / "run" / "logs" / "engine.log").write_text("why")
    folder.release(keep_logs=True)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["logs"]


def test_what_a_killed_owner_left_is_removed_and_its_orphans_end(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    arena = Path(arena_prefix(str(path), "x", os.getuid(), "/dev/shm") + "prefill-0")
    arena.write_bytes(b"bytes")
    (path / "old.sock").touch()
    orphan = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()", str(path / SPEC_FILE)])
    stranger = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    children = [
        ChildStatus(name=name, kind="node", state="ready", pid=process.pid, restarts=0, since_s=0.0)
        for name, process in (("orphan", orphan), ("stranger", stranger))
    ]
    (path / STATE_FILE).write_bytes(msgspec.json.encode(state(*children)))
    folder = RunFolder(path, "x")
    folder.acquire()
    try:
        assert orphan.wait(30) == -signal.SIGKILL
        assert is_alive(stranger.pid), "a process id that somebody else has now is left alone"
        assert not arena.exists()
        assert not (path / "old.sock").exists()
        assert read_state(path) is None
    finally:
        stranger.kill()
        stranger.wait()
        folder.release()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(ConfigError, match="belongs to another user"):
        private_folder(tmp_path / "run")


def test_a_busy_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(1)
        port = sock.getsockname()[1]
        settings = tripwire_settings(tmp_path)
        settings = msgspec.structs.replace(settings, gateway=msgspec.structs.replace(settings.gateway, port=port))
        with pytest.raises(ConfigError, match=rf"gateway\.port = {port}: .*Address already in use.*--port"):
            LocalCluster(settings).start()
    assert not (tmp_path / "run").exists()
    assert busy_port("127.0.0.1", 0) is None


def fitted(*sets: str) -> tuple[Resolved, Settings, list[str]]:
    resolved = gather(SECTIONS, file=None, variables={}, sets=sets, directory="/nonexistent")
    resolved, problems = fit(resolved, settings_of(resolved), "/tmp/anabranch-nowhere")
    return resolved, settings_of(resolved), problems


def test_sizes_beyond_this_machine_are_refused_with_what_there_is() -> None:
    _, _, problems = fitted("node.ssd_bytes=4000TB", "node.dram_bytes=4000TB")
    assert len(problems) == 2
    for problem, key in zip(problems, ("dram_bytes", "ssd_bytes"), strict=True):
        assert f"node.{key} = " in problem
        assert "for each of 2 nodes" in problem
        assert "does not fit: only" in problem
        assert "or less" in problem


def test_a_default_that_does_not_fit_is_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.cluster.live.capacity.memory_room", lambda: (64 << 20, "64MiB free in /dev/shm"))
    monkeypatch.setattr("anabranch.cluster.live.capacity.disk_room", lambda folder: 100 << 20)
    resolved, settings, problems = fitted()
    assert problems == []
    assert (settings.node.dram_bytes, settings.node.ssd_bytes) == (16 << 20, 25 << 20)
    assert resolved.origin("node", "dram_bytes") == "fitted to 64MiB free in /dev/shm"


def test_what_the_tier_occupies_already_counts_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: frozen)
    before = disk_room(str(tmp_path))
    with (tmp_path / "data").open("wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    assert disk_room(str(tmp_path)) >= before + (1 << 20)


def test_a_missing_extra_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'anabranch\[serve\]'"):
        LocalCluster(tripwire_settings(tmp_path)).start()
    assert not (tmp_path / "run").exists()
