"""The store's own processes, put together from settings: a directory, a node, each with its metrics.

**Covers** which parts a process has and in which order they start and stop. **Does not cover** signals and printing
(`cli`), nor clusters of engines (`cluster.live.entry`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from anabranch.cluster.settings import Settings
from anabranch.core.authentication import Access, Credentials, is_local, must_authenticate
from anabranch.core.config import TraceConfig
from anabranch.core.errors import ConfigError, InvariantBroken
from anabranch.core.live.handshake import Dialer
from anabranch.core.live.tracing import Exporter
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.metrics_server import MetricsServer
from anabranch.store.live.stat_client import ask_stat
from anabranch.store.messages import Stat
from anabranch.store.metrics import Role
from anabranch.store.values.config import StoreConfig
from anabranch.store.values.contracts import BackingTier, Cipher, DiskTier
from anabranch.store.values.live.administration import probe
from anabranch.store.values.live.credentials import access_of, tls_of
from anabranch.store.values.live.host_links import links_of
from anabranch.store.values.live.node_server import ValueNode
from anabranch.store.values.live.request_spans import NodeSpans
from anabranch.store.values.live.session import Session
from anabranch.transfer.topology import split_addresses

if TYPE_CHECKING:
    from anabranch.store.values.live.tenant_keys import TenantKeys

PROBE_TENANT = "anabranch.probe"
PROBE_S = 2.0
log = logging.getLogger(__name__)
_LONGEST_SOCKET_PATH = 100


class Service(Protocol):
    """A started process's heart."""

    @property
    def address(self) -> str: ...
    @property
    def ended(self) -> bool: ...
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

    @property
    def ended(self) -> bool:
        """It has left the store and may stop."""
        return self._service.ended

    def stop(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._service.stop()


def start_directory(settings: Settings, *, metrics: str = "") -> Running:
    """Raises ConfigError, Unavailable (the address is taken) or MissingExtra."""
    access, tls = access_of(settings.security), tls_of(settings.security)
    dial = Dialer(Credentials(secret=access.cluster_secret), tls)
    server = DirectoryServer(settings.directory, access=access, tls=tls, dial=dial).start()

    def answers() -> None:
        ask_stat(server.address, timeout_s=PROBE_S, dial=dial)

    _warn_of_open(metrics, access)
    return Running(_Directory(server), "directory", server.stat, answers, metrics)


def start_node(settings: Settings, name: str, *, data_dir: str = "", metrics: str = "", keep: bool = False) -> Running:
    """`keep`: what is in memory is left for a successor when the process stops. Raises ConfigError for what cannot be
    (a secret that is missing, memory that is not there, a folder in use), Unavailable (the address is taken) or
    MissingExtra."""
    access, tls = access_of(settings.security), tls_of(settings.security)
    must_authenticate(split_addresses(settings.store.listen), access)
    links = links_of(settings.link)
    folder = node_folder(name, data_dir)
    spans = exporter_of(settings.trace, name)
    keys = keys_of(settings, access, folder)
    disk, backing = open_tiers(settings.store, folder, keys.ciphers if keys is not None else None)
    try:
        node = ValueNode(
            name,
            settings.store,
            settings.write,
            unix_address=f"unix:{socket_path(folder)}",
            arena_path=arena_path(folder),
            data_dir=str(folder),
            access=access,
            tls=tls,
            disk=disk,
            backing=backing,
            links=links,
            keys=keys,
            spans=NodeSpans(spans.tracing, name) if spans is not None else None,
        )
        node.start()
    except BaseException:
        for tier in (disk, backing):
            if tier is not None:
                tier.close()
        raise
    # Through the node's own listener, as a tenant that nobody else is.
    session = Session(Credentials(secret=access.cluster_secret, tenant=PROBE_TENANT), tls=tls, name="probe")
    _warn_of_open(metrics, access)
    return Running(
        _Node(node, keep, spans, disk is None and backing is None),
        "node",
        node.stat,
        lambda: probe(split_addresses(node.address)[0], session),
        metrics,
    )


def _warn_of_open(metrics: str, access: Access) -> None:
    """Allowed, as monitoring has no secret to prove: what it shows are counts and tenants' names."""
    if metrics and not is_local(metrics) and not access.authenticates:
        log.warning(
            "--metrics %s answers whoever reaches it: bind it to 127.0.0.1, or where only monitoring is", metrics
        )


class _Directory:
    ended = False

    def __init__(self, server: DirectoryServer) -> None:
        self._server = server

    @property
    def address(self) -> str:
        return self._server.address

    def stop(self) -> None:
        self._server.stop()


class _Node:
    def __init__(self, node: ValueNode, keep: bool, spans: Exporter | None, in_memory_only: bool) -> None:
        self._node = node
        self._in_memory_only = in_memory_only
        self._keep = keep
        self._spans = spans

    @property
    def address(self) -> str:
        return self._node.address

    @property
    def ended(self) -> bool:
        return self._node.drained.is_set() or self._node.failure is not None

    def stop(self) -> None:
        if self._in_memory_only and not self._keep and not self.ended and (count := self._node.stat().census["values"]):
            log.warning("%d values were in memory only and are dropped; with --keep a successor has them", count)
        self._node.stop(keep=self._keep)
        if self._node.failure is not None:
            raise InvariantBroken(f"the node's clock failed: {self._node.failure!r}") from self._node.failure
        if self._spans is not None:
            self._spans.close()


def exporter_of(config: TraceConfig, name: str) -> Exporter | None:
    """None if no spans are wanted. Raises ConfigError, or MissingExtra without opentelemetry."""
    return Exporter(config.endpoint, name, config.share) if config.endpoint else None


def open_tiers(store: StoreConfig, folder: Path, cipher: Cipher | None) -> tuple[DiskTier | None, BackingTier | None]:
    """The tiers below DRAM that the settings name. Raises ConfigError, MissingExtra, or Unavailable (the backing store
    cannot be reached)."""
    from anabranch.store.values.live.backing import open_backing
    from anabranch.store.values.live.log.value_log import ValueLog

    backing = open_backing(store.backing, cipher=cipher)
    if store.ssd_bytes == 0:
        return None, backing
    try:
        return ValueLog(store.ssd_dir or str(folder / "ssd"), store.ssd_bytes, cipher=cipher), backing
    except BaseException:
        if backing is not None:
            backing.close()
        raise


def keys_of(settings: Settings, access: Access, folder: Path) -> TenantKeys | None:
    """None if no tenant is encrypted. Raises ConfigError, or MissingExtra without cryptography."""
    encrypted = [name for name, rules in access.tenants.items() if rules.encrypt]
    if not encrypted:
        return None
    store, security = settings.store, settings.security
    if not access.cluster_secret:
        raise ConfigError(f"tenant '{encrypted[0]}' is encrypted, which needs security.secret_file: it wraps the keys")
    if not security.keys_dir and (store.directory or store.backing):
        raise ConfigError(f"tenant '{encrypted[0]}' is encrypted: set security.keys_dir to a folder all nodes share")
    from anabranch.store.values.live.encryption import TenantCiphers
    from anabranch.store.values.live.tenant_keys import TenantKeys

    ciphers = TenantCiphers(security.keys_dir or str(folder / "keys"), access.cluster_secret, strict=True)
    return TenantKeys(ciphers, access)


def arena_path(folder: Path) -> str:
    """In shared memory; the same for the same folder, so that a successor finds it."""
    digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    return f"/dev/shm/anabranch-store-{os.getuid()}-{digest}"


def node_name(listen: str) -> str:
    """The default: this host and the port, or the process if any port will do."""
    port = listen.rpartition(":")[2]
    return f"{socket.gethostname()}-{port if port != '0' else os.getpid()}"


def node_folder(name: str, data_dir: str) -> Path:
    """Where a node keeps what outlives it, absolute: its clients look from other folders. Made if it is not there.
    Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if base else Path.home() / ".cache"
    folder = Path(data_dir) if data_dir else home / "anabranch" / "store" / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--data-dir {folder}: {error.strerror}") from error
    return folder.resolve()


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
