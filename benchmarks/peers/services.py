"""The stores that a run compares: how their processes are found, installed, started, asked and stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "anabranch" / "peers"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
READY_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


class Absent(Exception):
    """A peer cannot be measured here; the text says why."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_port(address: str, process: subprocess.Popen[Any]) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + READY_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.05)
    raise Absent(f"{process.args} did not come up (exit code {process.poll()})")


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Asked:
    """A worker process (`worker.py`): `ask` sends a command and waits for its answer."""

    def __init__(self, python: str, peer: str, log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(HERE / "worker.py"), f"{HERE}/{peer}"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises Absent if the worker ended instead of answering."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            last = self._log.read_text().strip().splitlines()[-1:]
            raise Absent(f"its client ended in {do!r}: {' '.join(last) or 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]


class Store:
    """One store that runs: `reader` asks it over TCP, `local` (or None) is a client that shares its memory."""

    def __init__(self, name: str, python: str, peer: str, folder: Path, segment: int) -> None:
        self.name = name
        self.version = ""
        self.master = ""
        self.local: Asked | None = None
        self.segment = segment
        self.folder = folder
        self._python = python
        self._peer = peer
        self._services: list[subprocess.Popen[Any]] = []
        self._clients: list[Asked] = []

    def serve(self, command: Sequence[str], *, reads: bool = False) -> subprocess.Popen[Any]:
        log = self.folder / f"{self.name}-{len(self._services)}.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                list(command), stdout=subprocess.PIPE if reads else errors, stderr=errors, text=True
            )
        self._services.append(process)
        return process

    def client(self, buffer: int, peer: str = "", **options: Any) -> Asked:
        log = self.folder / f"{self.name}-client-{len(self._clients)}.log"
        asked = Asked(self._python, peer or self._peer, log)
        self._clients.append(asked)
        self.version = asked.ask("open", master=self.master, buffer=buffer, **options)["version"]
        return asked

    def cpu_s(self) -> float:
        """CPU seconds of the service's processes and of its clients so far."""
        pids = [process.pid for process in self._services] + [asked.process.pid for asked in self._clients]
        return sum(map(cpu_s, pids))

    def connect(self, buffer: int, **options: Any) -> None:
        self.reader = self.client(buffer, local_buffer=512 << 20, **options)

    def stop(self) -> None:
        for asked in reversed(self._clients):
            asked.stop()
        for process in reversed(self._services):
            process.terminate()
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


# --- each store -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def bare(folder: Path, segment: int, buffer: int) -> Iterator[Store]:
    """Two processes and a socket."""
    store = Store("bare", sys.executable, "bare_peer.py:Bare", folder, segment)
    try:
        process = store.serve([sys.executable, str(HERE / "bare_peer.py"), str(segment)], reads=True)
        assert process.stdout is not None
        store.master = f"127.0.0.1:{int(process.stdout.readline())}"
        store.connect(buffer)
        yield store
    finally:
        store.stop()


@contextlib.contextmanager
def anabranch(folder: Path, segment: int, buffer: int) -> Iterator[Store]:
    """A directory, a node, a reader over TCP, and (`local`) a client that maps the node's memory."""
    store = Store("anabranch", sys.executable, "anabranch_peer.py:Anabranch", folder, segment)
    directory, node = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [sys.executable, "-m", "anabranch"]
    try:
        wait_port(directory, store.serve([*command, "directory", "--listen", directory]))
        data = ["--data-dir", str(folder / "node"), "--name", f"speed-{os.getpid()}"]
        arena = ["--set", f"store.dram_bytes={segment}"]
        wait_port(node, store.serve([*command, "node", "--listen", node, "--directory", directory, *data, *arena]))
        store.master = node
        store.local = store.client(64 << 20, local=True, directory=directory)
        store.connect(buffer, directory=directory)
        yield store
    finally:
        store.stop()


@contextlib.contextmanager
def mooncake(folder: Path, segment: int, buffer: int, python: str) -> Iterator[Store]:
    """Master, owner of the segment (`local`: its own calls are memcpy), and a reader without a segment."""
    store = Store("mooncake", python, "mooncake_peer.py:Mooncake", folder, segment)
    master = Path(python).parent / "mooncake_master"
    if not master.exists():
        raise Absent(f"no mooncake_master beside {python}")
    port = free_port()
    try:
        process = store.serve(
            [str(master), "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1",
             f"--metrics_port={free_port()}"]
        )  # fmt: skip
        store.master = f"127.0.0.1:{port}"
        wait_port(store.master, process)
        store.local = store.client(64 << 20, segment=segment, local_buffer=64 << 20)
        store.connect(buffer)
        yield store
    finally:
        store.stop()


@contextlib.contextmanager
def redis(folder: Path, segment: int, buffer: int, python: str, server: str) -> Iterator[Store]:
    """One server without persistence, and a client with hiredis."""
    store = Store("redis", python, "redis_peer.py:Redis", folder, segment)
    port = free_port()
    try:
        process = store.serve(
            [
                server,
                "--bind",
                "127.0.0.1",
                "--port",
                str(port),
                "--save",
                "",
                "--appendonly",
                "no",
                "--dir",
                str(folder),
            ]
        )
        store.master = f"127.0.0.1:{port}"
        wait_port(store.master, process)
        store.connect(buffer)
        yield store
    finally:
        store.stop()


# --- finding and installing -----------------------------------------------------------------------------------------


def find_mooncake(given: str, install: bool) -> str:
    """The Python that has Mooncake. Raises Absent."""
    python = Path(given) if given else CACHE / "mooncake" / "bin" / "python"
    if not python.exists() and install and not given:
        make_environment(python.parent.parent, MOONCAKE)
    return check(python, "from mooncake.store import MooncakeDistributedStore", "--mooncake-python")


def find_redis(given: str, server: str, install: bool) -> tuple[str, str]:
    """(the Python that has redis-py with hiredis, the server's binary). Raises Absent."""
    found = server or shutil.which("redis-server") or shutil.which("valkey-server")
    if not found:
        raise Absent("no redis-server or valkey-server on the path: install it, or give --redis PATH")
    python = Path(given) if given else CACHE / "redis" / "bin" / "python"
    if not python.exists() and install and not given:
        make_environment(python.parent.parent, "redis[hiredis]")
    return check(python, "import redis, hiredis", "--redis-python"), found


def check(python: Path, imports: str, option: str) -> str:
    if not python.exists():
        raise Absent(f"not installed: --install-peers, or {option} PATH")
    tried = subprocess.run([str(python), "-c", imports], capture_output=True, text=True)
    if tried.returncode:
        raise Absent(f"{python}: {tried.stderr.strip().splitlines()[-1]}")
    return str(python)


def make_environment(folder: Path, package: str) -> None:
    """A virtual environment with one package. Raises Absent."""
    print(f"installing {package} into {folder}", file=sys.stderr)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-qq", "install", package],
    ):
        if subprocess.run(command).returncode:
            raise Absent(f"{' '.join(command)} failed")
