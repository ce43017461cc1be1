"""The store's own processes, put together from settings: a directory, a node, each with its metrics.

**Covers** which parts a process has and in which order they start and stop. **Does not cover** signals and printing
(`cli`), nor clusters of engines (`cluster.live.entry`).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from anabranch.cluster.settings import Settings
from anabranch.core.authentication import Credentials
from anabranch.core.errors import ConfigError
from anabranch.core.live.handshake import Dialer
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.metrics_server import MetricsServer
from anabranch.store.live.stat_client import ask_stat
from anabranch.store.messages import Stat
from anabranch.store.metrics import Role
from anabranch.store.values.live.credentials import access_of, tls_of

PROBE_TENANT = "anabranch.probe"
PROBE_S = 2.0
_LONGEST_SOCKET_PATH = 100


class Service(Protocol):
    """A started process's heart."""

    @property
    def address(self) -> str: ...
    def stop(self) -> None: ...


class Running:
    """A service and its metrics. `stop` ends both; `metrics_address` is empty without."""

    def __init__(
        self, service: Service, role: Role, stat: Callable[[], Stat], probe: Callable[[], None], metrics: str
    ) -> None:
        self._service = service
        try:
            self._metrics = MetricsServer(metrics, role, stat, probe) if metrics else None
        except BaseException:
            service.stop()
            raise

    @property
    def address(self) -> str:
        return self._service.address

    @property
    def metrics_address(self) -> str:
        return self._metrics.address if self._metrics is not None else ""

    def stop(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._service.stop()


def start_directory(settings: Settings, *, metrics: str = "") -> Running:
    """Raises ConfigError, Unavailable (the address is taken) or MissingExtra."""
    access, tls = access_of(settings.security), tls_of(settings.security)
    server = DirectoryServer(settings.directory, access=access, tls=tls).start()
    dial = Dialer(Credentials(secret=access.cluster_secret), tls)

    def probe() -> None:
        ask_stat(server.address, timeout_s=PROBE_S, dial=dial)

    return Running(server, "directory", server.stat, probe, metrics)


def start_node(settings: Settings, name: str, *, data_dir: str = "", metrics: str = "") -> Running:
    """Raises ConfigError for what cannot be (a secret that is missing, memory that is not there, a folder in use),
    Unavailable (the address is taken) or MissingExtra."""
    raise ConfigError("nodes of the store are not built yet")


def node_name(listen: str) -> str:
    """The default: this host and the port, or the process if any port will do."""
    port = listen.rpartition(":")[2]
    return f"{socket.gethostname()}-{port if port != '0' else os.getpid()}"


def node_folder(name: str, data_dir: str) -> Path:
    """Where a node keeps what outlives it. Made if it is not there. Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if base else Path.home() / ".cache"
    folder = Path(data_dir) if data_dir else home / "anabranch" / "store" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
    return folder


def socket_path(folder: Path) -> str:
    """In the node's folder, or, as such paths have at most 107 bytes, in a private one of the user's."""
    path = folder / "node.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return str(path)
    private = Path(f"/tmp/anabranch-{os.getuid()}")
    private.mkdir(mode=0o700, exist_ok=True)
    found = private.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{private} is not private: remove it, or choose a shorter --data-dir")
    return str(private / f"store-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}.sock")
