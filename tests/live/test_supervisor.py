"""Supervision of stand-in processes: stages, restarts, order of stopping, death with the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.cluster.live.child import ChildPlan, ChildStatus
from anabranch.cluster.live.supervisor import Supervisor
from anabranch.cluster.restart import RestartConfig
from anabranch.core.errors import Unavailable
from anabranch.core.live.process import is_alive

# Writes "<name> start|stop" to a journal and obeys SIGTERM.
STAND_IN = """
import os, signal, sys
def note(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} {word}\\n")
def stop(*_):
    note("stop")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
note("start")
while True:
    signal.pause()
"""


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


class Rig:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.events: list[tuple[str, str]] = []

    def lines(self) -> list[str]:
        return self.journal.read_text().splitlines()

    def child(self, name: str, start: int = 0, stop: int = 0, code: str = STAND_IN, grace_s: float = 10.0) -> ChildPlan:
        return ChildPlan(
            name=name,
            kind="test",
            argv=[sys.executable, "-S", "-c", code, str(self.journal), name],
            ready=lambda: f"{name} start" in self.lines(),
            start_stage=start,
            stop_stage=stop,
            grace_s=grace_s,
        )

    def supervisor(self, *plans: ChildPlan) -> Supervisor:
        fast = RestartConfig(base_s=0.001, most_s=0.01)
        return Supervisor(
            plans, self.folder, restart=fast, on_event=lambda name, text: self.events.append((name, text))
        )


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def named(statuses: list[ChildStatus], name: str) -> ChildStatus:
    return next(status for status in statuses if status.name == name)


def test_starts_stage_by_stage_and_stops_in_its_own_order(rig: Rig) -> None:
    supervisor = rig.supervisor(rig.child("base", 0, 1), rig.child("top", 1, 0), rig.child("side", 1, 0))
    supervisor.start(timeout_s=60)
    started = rig.lines()
    assert started[0] == "base start"
    assert set(started[1:]) == {"top start", "side start"}
    pids = [status.pid for status in supervisor.statuses()]
    supervisor.stop()
    stopped = rig.lines()[3:]
    assert set(stopped[:2]) == {"top stop", "side stop"}
    assert stopped[2:] == ["base stop"]
    assert not any(is_alive(pid) for pid in pids)
    supervisor.stop()


def test_a_killed_child_is_restarted(rig: Rig) -> None:
    supervisor = rig.supervisor(rig.child("a"), rig.child("b"))
    supervisor.start(timeout_s=60)
    try:
        other = named(supervisor.statuses(), "b").pid
        dead = supervisor.signal("a", signal.SIGKILL)
        assert supervisor.wait_until(
            lambda s: named(s, "a").state == "ready" and named(s, "a").pid not in (0, dead), timeout_s=30
        )
        status = named(supervisor.statuses(), "a")
        assert (status.restarts, status.last_exit) == (1, "killed by SIGKILL")
        assert named(supervisor.statuses(), "b").pid == other
        assert ("a", "ended (killed by SIGKILL); restarting") in rig.events
    finally:
        supervisor.stop()


def test_a_child_that_cannot_start_fails_the_start_with_its_log(rig: Rig) -> None:
    broken = rig.child("broken", 1, code="import sys; sys.exit('no such model: xyz')")
    supervisor = rig.supervisor(rig.child("fine"), broken)
    with pytest.raises(
        Unavailable, match=r"broken cannot start \(exit code 1\); .*broken.log ends with:\n(?s:.*)no such model: xyz"
    ):
        supervisor.start(timeout_s=60)
    assert all(status.pid == 0 for status in supervisor.statuses())


def test_a_child_that_refuses_its_input_is_not_tried_again(rig: Rig) -> None:
    refusing = rig.child("refusing", code="import sys; print('error: bad key file'); sys.exit(2)")
    with pytest.raises(Unavailable, match=r"refusing cannot start \(exit code 2\); .*:\nerror: bad key file"):
        rig.supervisor(refusing).start(timeout_s=60)
    assert (rig.folder / "refusing.log").read_text().count("bad key file") == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_supervisor_that_breaks_down_says_so_and_takes_its_children_along(rig: Rig) -> None:
    def broken(statuses: list[ChildStatus]) -> None:
        if statuses[0].state == "ready":
            raise OSError("no space left")

    supervisor = Supervisor([rig.child("a")], rig.folder, on_change=broken)
    with pytest.raises(Unavailable, match="the supervisor failed: OSError"):
        supervisor.start(timeout_s=60)
    assert "a start" in rig.lines()


def test_a_child_that_keeps_failing_later_is_told_with_its_log_and_the_rest_runs(rig: Rig) -> None:
    # The first life works; after it, the marker makes every life end at once.
    code = STAND_IN.replace(
        'note("start")', 'os.path.exists(sys.argv[1] + ".bad") and sys.exit("disk full"); note("start")'
    )
    supervisor = rig.supervisor(rig.child("flaky", code=code), rig.child("steady"))
    supervisor.start(timeout_s=60)
    try:
        steady = named(supervisor.statuses(), "steady").pid
        marker = Path(f"{rig.journal}.bad")
        marker.touch()
        supervisor.signal("flaky", signal.SIGKILL)
        wait_for(lambda: any("keeps failing" in text and "disk full" in text for _, text in list(rig.events)))
        marker.unlink()
        assert supervisor.wait_until(lambda s: named(s, "flaky").state == "ready", timeout_s=30)
        assert named(supervisor.statuses(), "steady").pid == steady
    finally:
        supervisor.stop()


def test_a_child_that_ignores_the_request_is_killed_after_its_grace(rig: Rig) -> None:
    deaf = STAND_IN.replace("def stop(*_):", "def stop(*_):\n    return")
    supervisor = rig.supervisor(rig.child("deaf", code=deaf, grace_s=0.05))
    supervisor.start(timeout_s=60)
    pid = supervisor.statuses()[0].pid
    supervisor.stop()
    assert not is_alive(pid)
    assert any("killed" in text for _, text in rig.events)


def test_killing_cuts_a_stop_short(rig: Rig) -> None:
    deaf = STAND_IN.replace("def stop(*_):", "def stop(*_):\n    return")
    supervisor = rig.supervisor(rig.child("deaf", code=deaf, grace_s=1000.0))
    supervisor.start(timeout_s=60)
    stopper = threading.Thread(target=supervisor.stop)
    stopper.start()
    assert supervisor.wait_until(lambda s: s[0].state == "stopping", timeout_s=30)
    supervisor.kill_all()
    stopper.join(30)
    assert not stopper.is_alive()


def test_a_stopped_process_still_stops(rig: Rig) -> None:
    supervisor = rig.supervisor(rig.child("frozen"))
    supervisor.start(timeout_s=60)
    supervisor.signal("frozen", signal.SIGSTOP)
    supervisor.stop()
    assert rig.lines() == ["frozen start", "frozen stop"]


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    child = (
        "import os, sys, time; from anabranch.core.live.process import die_with_parent; "
        "die_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert is_alive(pid)
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not is_alive(pid))


def test_a_child_of_a_dead_parent_leaves_at_once() -> None:
    code = "from anabranch.core.live.process import die_with_parent; die_with_parent(1 << 22); print('alive')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_no_descriptor_or_thread_is_left(rig: Rig) -> None:
    before = len(os.listdir("/proc/self/fd"))
    supervisor = rig.supervisor(rig.child("a"))
    supervisor.start(timeout_s=60)
    supervisor.stop()
    assert len(os.listdir("/proc/self/fd")) == before
    wait_for(lambda: not any(t.name in ("supervisor", "a-ready") for t in threading.enumerate()))
