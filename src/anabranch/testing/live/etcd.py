"""etcd of one or several members as child processes on loopback, to be killed and started again."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from anabranch.core.errors import Unavailable
from anabranch.core.live.process import die_with_parent
from anabranch.store.live.etcd import SCHEME, Etcd

READY_S = 60.0


def etcd_program() -> str | None:
    """Where etcd is installed (Debian: package etcd-server); None if it is not."""
    return shutil.which("etcd")


class EtcdMembers:
    """A context manager. `address` is what settings want: etcd://…. Raises Unavailable if it does not start."""

    def __init__(self, folder: Path, members: int = 1) -> None:
        self._folder = folder
        self._ports = [(_free_port(), _free_port()) for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{client}" for client, _ in self._ports)

    @property
    def address(self) -> str:
        return SCHEME + ",".join(self.endpoints)

    @property
    def pids(self) -> dict[int, int]:
        """Of the members that run, by number."""
        return {member: process.pid for member, process in self._processes.items()}

    def __enter__(self) -> EtcdMembers:
        try:
            for member in range(len(self._ports)):
                self.start(member)
            self.ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, member: int) -> None:
        """With the data it had, if it ran before."""
        program = etcd_program()
        if program is None:
            raise Unavailable("etcd is not installed: apt-get install etcd-server")
        self._folder.mkdir(parents=True, exist_ok=True)
        parent, (client, peer) = os.getpid(), self._ports[member]
        others = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, (_, port) in enumerate(self._ports))
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [
                    program, "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}"),
                    "--listen-client-urls", f"http://127.0.0.1:{client}",
                    "--advertise-client-urls", f"http://127.0.0.1:{client}",
                    "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                    "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                    "--initial-cluster", others, "--initial-cluster-state", "new",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"},
                preexec_fn=lambda: die_with_parent(parent),
            )  # fmt: skip

    def ready(self) -> None:
        """Wait until it answers, which takes most of its members."""
        etcd = Etcd(self.endpoints, 2.0)
        end = time.monotonic() + READY_S
        while True:
            try:
                etcd.range("/")
            except Unavailable:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
            else:
                break
        etcd.close()

    def kill(self, member: int) -> None:
        process = self._processes.pop(member)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            with contextlib.suppress(ChildProcessError):
                process.wait()
        self._processes.clear()


def _free_port() -> int:
    """Below the range from which the system gives outgoing connections theirs."""
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise Unavailable("no free port on 127.0.0.1")
