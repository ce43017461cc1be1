"""`anabranch directory` and `anabranch node` as processes, for tests."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from anabranch.core.live.process import die_with_parent

PATIENCE_S = 60.0
_READY = re.compile(r"(\S+) ready at (\S+?)(?: \(metrics at http://(\S+)/metrics\))?\n")


class StoreProcess:
    """Running and ready. `address`, `metrics`: as its ready line says."""

    def __init__(self, *arguments: str, folder: Path, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ANABRANCH_")}
        self.errors = folder / f"stderr-{time.monotonic_ns()}"
        parent = os.getpid()
        with self.errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "anabranch", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=folder,
                text=True,
                env={**clean, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
                preexec_fn=lambda: die_with_parent(parent),
            )
        try:
            line = self._line()
            match = _READY.fullmatch(line)
            assert match, f"{line!r} {self.errors.read_text()}"
        except BaseException:
            self.kill()
            raise
        self.name, self.address, self.metrics = match.groups()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        try:
            return self._process.wait(PATIENCE_S)
        finally:
            self.kill()

    def stop(self) -> int:
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        self._close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        end = time.monotonic() + PATIENCE_S
        while not select.select([self._process.stdout], [], [], 0.5)[0]:
            assert time.monotonic() < end, f"not ready after {PATIENCE_S} s: {self.errors.read_text()}"
        return self._process.stdout.readline()

    def _close(self) -> None:
        if self._process.stdout is not None:
            self._process.stdout.close()


def refused(*arguments: str, folder: Path) -> tuple[int, str]:
    """Exit code and standard error of a command that does not start."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANABRANCH_")}
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=folder,
        env={**clean, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    return done.returncode, done.stderr


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S} s"
        time.sleep(0.02)
