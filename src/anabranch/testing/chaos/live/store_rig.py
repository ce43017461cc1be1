"""A store of real processes that can be tormented: nodes, directories, etcd, and clients that never stop calling.

**Covers** starting, restarting, asking and stopping them. **Does not cover** blows and judgement (`store_campaign`).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from anabranch.core.authentication import Credentials
from anabranch.core.errors import AnabranchError, ConfigError, Unavailable
from anabranch.store.messages import Stat
from anabranch.store.values.live.administration import Administrator
from anabranch.store.values.live.session import Session
from anabranch.store.values.report import Listed
from anabranch.testing.chaos.live.store_caller import Plan
from anabranch.testing.chaos.live.victims import Victim
from anabranch.testing.chaos.store_oracle import Traffic

READY_S = 30.0
ASK_S = 2.0
FIRST_PORT = 20_000


class RigConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`etcd`: directories are candidates whose leader etcd elects; without it there is one. `ssd_bytes` holds all that
    is ever put, so that what was acknowledged durable must be found again."""

    nodes: int = 3
    directories: int = 1
    etcd: bool = False
    callers: int = 3
    threads: int = 2
    dram_bytes: int = 64 << 20
    ssd_bytes: int = 2 << 30
    rest_s: float = 0.0
    lease_s: float = 3.0
    traffic: Traffic = Traffic()


class StoreRig:
    """`victims`: name → process. `resolve` turns "directory-leader" into the name of the one that leads now."""

    def __init__(self, folder: Path, config: RigConfig, seed: int, follow: Callable[[str, IO[bytes]], None]) -> None:
        self.folder = folder
        self.victims: dict[str, Victim] = {}
        self._config = config
        self._seed = seed
        self._follow = follow
        self._ports = _ports()
        self._logs = folder / "logs"
        self._logs.mkdir(parents=True)
        self.addresses: dict[str, str] = {}
        self.directory = ""

    # --- life -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Everything but the callers. Raises Unavailable if it does not get ready."""
        if self._config.etcd:
            self._start_etcd()
        for index in range(self._config.directories):
            self._start_directory(f"directory-{index}")
        if not self._config.etcd:
            self.directory = self.addresses["directory-0"]
        for index in range(self._config.nodes):
            self._start_node(f"node-{index}")
        self.wait_ready()

    def start_callers(self) -> None:
        nodes = [self.addresses[name] for name in self.names("node")]
        for index in range(self._config.callers):
            order = nodes[index % len(nodes) :] + nodes[: index % len(nodes)]
            self._start_caller(f"caller-{index}", order, index)

    def stop_callers(self) -> None:
        for name in self.names("caller"):
            self.victims.pop(name).stop()

    def stop(self) -> None:
        """In the order in which they would not miss each other."""
        for kind in ("caller", "node", "directory", "etcd"):
            victims = [self.victims.pop(name) for name in self.names(kind)]
            for victim in victims:
                victim.stop()
        for left in Path("/dev/shm").glob(f"*{self.folder.name}*"):
            left.unlink(missing_ok=True)

    def names(self, kind: str) -> list[str]:
        return sorted(name for name in self.victims if name.startswith(kind))

    @property
    def choices(self) -> list[str]:
        """Who may be struck; whichever directory leads counts as one more."""
        return [*self.victims, *(["directory-leader"] if self._config.directories > 1 else [])]

    @property
    def callers(self) -> list[str]:
        return self.names("caller")

    def resolve(self, victim: str) -> str:
        if victim != "directory-leader":
            return victim
        for name in self.names("directory"):
            with contextlib.suppress(AnabranchError):
                stat = self._stat(self.addresses[name], "directory")
                if stat.state.get("role") == "leader":
                    return name
        return self.names("directory")[0]

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until every node answers and the directory has heard all of each. Raises Unavailable."""
        end = time.monotonic() + timeout_s
        problem = ""
        while time.monotonic() < end:
            try:
                for name in self.names("node"):
                    self.stat(name)
                known = sum(
                    self._stat(self.addresses[name], "directory").census.get("synced_nodes", 0)
                    for name in self.names("directory")
                )
                if known >= self._config.nodes:
                    return
                problem = f"the directory knows {known} nodes"
            except AnabranchError as error:
                problem = str(error)
            time.sleep(0.05)
        raise Unavailable(f"the store is not ready after {timeout_s:.0f} s: {problem}")

    # --- questions ------------------------------------------------------------------------------------------------

    def stat(self, name: str) -> Stat:
        """Raises AnabranchError."""
        return self._stat(self.addresses[name], "node")

    def salt(self) -> bytes:
        """Of the tenant that the callers are."""
        address = self.addresses[self.names("node")[0]]
        lane, welcome = Session(Credentials()).open(address, ASK_S, time.monotonic() + ASK_S)
        lane.close()
        return welcome.salt

    def entries(self, name: str) -> list[Listed]:
        return list(self._administrator(ASK_S * 5).entries(self.addresses[name], name))

    def _stat(self, address: str, kind: str) -> Stat:
        if kind == "directory":
            report = Administrator(Session(Credentials()), address, timeout_s=ASK_S)
            try:
                found = report.report().directories[0]
            finally:
                report.close()
            if found.stat is None:
                raise Unavailable(found.problem)
            return found.stat
        return self._administrator(ASK_S).stat(address)

    def _administrator(self, timeout_s: float) -> Administrator:
        return Administrator(Session(Credentials()), nodes=list(self.addresses.values()), timeout_s=timeout_s)

    # --- processes ------------------------------------------------------------------------------------------------

    def _add(self, name: str, argv: Callable[[int], Sequence[str]], *, reads: bool = False) -> None:
        def follow(pipe: IO[bytes]) -> None:
            self._follow(name, pipe)

        log = self._logs / f"{name}.log"
        self.victims[name] = Victim(name, argv, log, on_start=follow if reads else None)

    def _start_etcd(self) -> None:
        binary = shutil.which("etcd")
        if binary is None:
            raise ConfigError("etcd is not installed: apt-get install etcd-server, or run without --etcd")
        client, peer = next(self._ports), next(self._ports)
        self.addresses["etcd-0"] = f"127.0.0.1:{client}"
        self.directory = f"etcd://127.0.0.1:{client}"
        argv = [
            binary, "--name", "chaos", "--data-dir", str(self.folder / "etcd"), "--logger", "zap",
            "--listen-client-urls", f"http://127.0.0.1:{client}", "--advertise-client-urls", f"http://127.0.0.1:{client}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"chaos=http://127.0.0.1:{peer}",
        ]  # fmt: skip
        self._add("etcd-0", lambda life: argv)

    def _start_directory(self, name: str) -> None:
        self.addresses[name] = f"127.0.0.1:{next(self._ports)}"
        argv = [*_COMMAND, "directory", "--listen", self.addresses[name]]
        if self._config.etcd:
            argv += ["--set", f"directory.etcd={self.directory}"]
        self._add(name, lambda life: argv)

    def _start_node(self, name: str) -> None:
        self.addresses[name] = f"127.0.0.1:{next(self._ports)}"
        config = self._config
        settings = {
            "store.dram_bytes": config.dram_bytes,
            "store.ssd_bytes": config.ssd_bytes,
            "store.lease_s": config.lease_s,
        }
        sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        argv = [
            *_COMMAND, "node", "--name", name, "--listen", self.addresses[name], "--directory", self.directory,
            "--data-dir", str(self.folder / name), *sets,
        ]  # fmt: skip
        self._add(name, lambda life: argv)

    def _start_caller(self, name: str, nodes: list[str], index: int) -> None:
        config = self._config

        def argv(life: int) -> list[str]:
            """Every life has keys of its own: what the last one knew of its own keys died with it."""
            plan = Plan(
                name=f"{name}.{life}", seed=self._seed * 10_000 + index * 100 + life, addresses=nodes,
                directory=self.directory, traffic=config.traffic, threads=config.threads, local=index != 0,
                rest_s=config.rest_s,
            )  # fmt: skip
            path = self.folder / f"{name}.{life}.json"
            path.write_bytes(msgspec.json.encode(plan))
            return [sys.executable, "-m", "anabranch.testing.chaos.live.store_caller", str(path)]

        self._add(name, argv, reads=True)


_COMMAND = [sys.executable, "-m", "anabranch"]


def _ports() -> Iterator[int]:
    """Free ports below those of outgoing connections, which would take one while its owner is dead."""
    for port in range(FIRST_PORT + (time.monotonic_ns() // 1000) % 8000, 32_000):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        yield port
