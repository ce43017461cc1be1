"""One supervised process: started, watched, restarted, stopped. Owned by the supervisor's thread."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from anabranch.cluster.restart import Restart, RestartConfig, RestartPolicy

State = Literal["waiting", "starting", "ready", "restarting", "stopping", "stopped"]


class ChildPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. `ready` is called from a thread of its own until it returns True; it may block for a second.

    Children of one start stage start together, once all children of lower stages are ready; stop stages follow each
    other likewise. After `grace_s` of SIGTERM a child is killed.
    """

    name: str
    kind: str
    argv: Sequence[str]
    ready: Callable[[], bool]
    start_stage: int = 0
    stop_stage: int = 0
    grace_s: float = 10.0
    environment: Mapping[str, str] | None = None


class ChildStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`since_s`: wall-clock time of the last start. `last_exit`: how the previous life ended, "" if there was none."""

    name: str
    kind: str
    state: State
    pid: int
    restarts: int
    since_s: float
    last_exit: str = ""


class Child:
    """The life of one process, over its restarts. Standard output and error go to the end of `log_path`."""

    def __init__(self, plan: ChildPlan, log_path: Path, restart: RestartConfig) -> None:
        self.plan = plan
        self.log_path = log_path
        self.state: State = "waiting"
        self.restarts = 0
        self.failures_before_ready = 0
        self.ever_ready = False
        self.due: float | None = None
        self.pidfd: int | None = None
        self.stop_deadline: float | None = None
        self.last_exit = ""
        self.last_code = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.started_wall = 0.0
        self._started = 0.0
        self._policy = RestartPolicy(restart)
        self._reaping = threading.Lock()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def spawn(self, now: float, wall: float) -> None:
        """Start the process in a process group of its own, so that a terminal's Ctrl-C reaches the supervisor alone."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.plan.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(self.plan.environment) if self.plan.environment is not None else None,
                process_group=0,
            )
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except OSError:
            # Without a descriptor nobody would notice its end.
            self.process.kill()
            self.process.wait()
            self.process = None
            raise
        self.state = "starting"
        self.due = None
        self._started, self.started_wall = now, wall

    def reap(self, now: float) -> Restart:
        """After the pidfd became readable: collect the exit, end the rest of its process group, plan the restart."""
        self.signal(signal.SIGKILL)
        with self._reaping:
            if self.process is not None:
                self.last_code = self.process.wait()
                self.last_exit = describe_exit(self.last_code)
            if self.pidfd is not None:
                os.close(self.pidfd)
            self.pidfd, self.process = None, None
        return self._policy.died(now - self._started)

    def signal(self, number: signal.Signals) -> None:
        """To the whole process group; from any thread, and never to a process id that has been reaped."""
        with self._reaping:
            if self.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)

    def status(self) -> ChildStatus:
        return ChildStatus(
            name=self.plan.name,
            kind=self.plan.kind,
            state=self.state,
            pid=self.pid,
            restarts=self.restarts,
            since_s=self.started_wall,
            last_exit=self.last_exit,
        )

    def log_tail(self, lines: int = 12) -> str:
        return tail(self.log_path, lines)


def describe_exit(code: int) -> str:
    """ "exit code 3" or "killed by SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; "" if there is none."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - (16 << 10)))
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    return ""
