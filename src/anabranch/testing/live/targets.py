"""A directory and a node with secrets, as processes of the command line, to be attacked."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from anabranch.core.errors import Unavailable
from anabranch.testing.live.store_fuzz import Secrets

READY_S = 30.0
LOG_LINES = 20
TRACEBACK_LINES = 40


class Targets:
    """A context manager. `addresses`, `pids`: by "node" and "directory". Raises Unavailable if one does not start."""

    def __init__(self, folder: Path, secret: Secrets, *, dram_bytes: int = 64 << 20, ssd_bytes: int = 0) -> None:
        self._folder = folder
        tenants, cluster = secret.write(folder)
        self.addresses = {name: f"127.0.0.1:{_free_port()}" for name in ("directory", "node")}
        common = ["--secret-file", str(cluster), "--set", f"security.tenants_file={tenants}"]
        self._commands = {
            "directory": ["directory", "--listen", self.addresses["directory"], *common],
            "node": [
                "node", "--name", "target", "--listen", self.addresses["node"],
                "--directory", self.addresses["directory"],
                "--data-dir", str(folder / "node"), "--set", f"store.dram_bytes={dram_bytes}",
                "--set", f"store.ssd_bytes={ssd_bytes}", *common,
            ],
        }  # fmt: skip
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def log(self, name: str) -> str:
        """The last lines that a target wrote."""
        return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_LINES:])

    def tracebacks(self, name: str) -> list[str]:
        """Exceptions that nobody expected."""
        parts = (self._folder / f"{name}.log").read_text(errors="replace").split("Traceback (most recent call last)")
        return ["\n".join(part.splitlines()[:TRACEBACK_LINES]) for part in parts[1:]]

    def __enter__(self) -> Targets:
        try:
            for name, command in self._commands.items():
                with (self._folder / f"{name}.log").open("wb") as log:
                    self._processes[name] = subprocess.Popen(
                        [sys.executable, "-m", "anabranch", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                    )
                self._wait(name)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait(self, name: str) -> None:
        host, _, port = self.addresses[name].rpartition(":")
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self._processes[name].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                return
            time.sleep(0.02)
        raise Unavailable(f"{name} did not start: {self.log(name)}")

    def _stop(self) -> None:
        for process in reversed(list(self._processes.values())):
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
