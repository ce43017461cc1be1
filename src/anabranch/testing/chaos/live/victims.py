"""Processes that are killed, stopped and started again: the supervisor of the store campaign."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

END_S = 10.0


class Victim:
    """One process over its lives. `argv(life)` names the command of each life; a dead one starts again after `pause_s`,
    until `stop`. `reads`: stdout is a pipe that `on_start` is given; otherwise it goes to the log."""

    def __init__(
        self,
        name: str,
        argv: Callable[[int], Sequence[str]],
        log: Path,
        *,
        pause_s: float = 0.05,
        on_start: Callable[[IO[bytes]], None] | None = None,
    ) -> None:
        self.name = name
        self.lives = 0
        self._argv = argv
        self._log = log
        self._pause_s = pause_s
        self._on_start = on_start
        self._stopping = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._lock = threading.Lock()
        self._start()
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def strike(self, number: signal.Signals) -> int:
        """Returns the pid that was struck; one that is dead already is not."""
        with self._lock:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            return self._process.pid

    def remove(self) -> None:
        """Kill it, and let it not come back before `restore`."""
        self._wanted.clear()
        self.strike(signal.SIGKILL)

    def restore(self) -> None:
        self._wanted.set()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """For good. What does not end in time is killed."""
        self._stopping.set()
        self._wanted.set()
        self.strike(signal.SIGCONT)
        self.strike(number)
        end = time.monotonic() + END_S
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        self.strike(signal.SIGKILL)
        self._watcher.join(END_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _start(self) -> None:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                list(self._argv(self.lives)),
                stdin=subprocess.DEVNULL,
                stdout=log if self._on_start is None else subprocess.PIPE,
                stderr=log,
            )
        with self._lock:
            self._process = process
            self.lives += 1
        if self._on_start is not None and process.stdout is not None:
            self._on_start(process.stdout)

    def _watch(self) -> None:
        while True:
            self._process.wait()
            self._wanted.wait()
            if self._stopping.wait(self._pause_s):
                return
            self._start()
