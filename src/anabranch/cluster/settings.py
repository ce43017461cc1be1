"""All settings of a cluster: which sections there are, what contradicts what, and what flags of `up` mean.

**Covers** everything that can be judged from the values alone. **Does not cover** what depends on the machine: free
disk, shared memory, busy ports (`cluster.live.capacity`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from anabranch.cluster.spec import ClusterConfig, ModelChoice
from anabranch.core.authentication import is_local
from anabranch.core.config import Entry, LogConfig, Resolved, Sections, TraceConfig
from anabranch.engine.config import EngineConfig
from anabranch.serving.config import GatewayConfig
from anabranch.store.config import DirectoryConfig, NodeConfig
from anabranch.store.values.config import LinkConfig, SecurityConfig, StoreConfig, WriteConfig

SECTIONS: Sections = {
    "model": ModelChoice,
    "cluster": ClusterConfig,
    "engine": EngineConfig,
    "node": NodeConfig,
    "directory": DirectoryConfig,
    "gateway": GatewayConfig,
    "store": StoreConfig,
    "write": WriteConfig,
    "link": LinkConfig,
    "security": SecurityConfig,
    "log": LogConfig,
    "trace": TraceConfig,
}
ADMISSIONS = ("second-use", "all", "evicted")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_LISTEN = re.compile(r"[^:\s]+:[0-9]{1,5}")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One field per section of SECTIONS."""

    model: ModelChoice = ModelChoice()
    cluster: ClusterConfig = ClusterConfig()
    engine: EngineConfig = EngineConfig()
    node: NodeConfig = NodeConfig()
    directory: DirectoryConfig = DirectoryConfig()
    gateway: GatewayConfig = GatewayConfig()
    store: StoreConfig = StoreConfig()
    write: WriteConfig = WriteConfig()
    link: LinkConfig = LinkConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()


def settings_of(resolved: Resolved) -> Settings:
    return msgspec.convert({name: msgspec.structs.asdict(part) for name, part in resolved.sections.items()}, Settings)


def contradictions(settings: Settings) -> Iterator[str]:
    """Values that are fine one by one and impossible together. Each names the keys and the remedy."""
    cluster, engine, node = settings.cluster, settings.engine, settings.node
    if not _NAME.fullmatch(cluster.name):
        yield f'cluster.name = "{cluster.name}": use 1 to 32 letters, digits, ".", "_" or "-", not starting with a sign'
    if cluster.both == 0 and (cluster.prefill == 0) != (cluster.decode == 0):
        lacking = "decode" if cluster.decode == 0 else "prefill"
        yield (
            f"cluster.prefill = {cluster.prefill} and cluster.decode = {cluster.decode} cannot serve: "
            f"set cluster.{lacking} to at least 1, or cluster.both"
        )
    elif cluster.both + cluster.prefill + cluster.decode == 0:
        yield "cluster.prefill, cluster.decode and cluster.both are all 0: set at least one of them"
    if engine.step_tokens < engine.block_tokens:
        yield (
            f"engine.step_tokens = {engine.step_tokens} is less than engine.block_tokens = {engine.block_tokens}: "
            "a step must have room for a block"
        )
    if settings.directory.node_ttl_s <= node.heartbeat_s:
        yield (
            f"directory.node_ttl_s = {settings.directory.node_ttl_s:g}s is not longer than node.heartbeat_s = "
            f"{node.heartbeat_s:g}s: every node would be forgotten between two heartbeats"
        )
    if node.ssd_bytes == 0 and node.ssd_dir:
        yield f'node.ssd_dir = "{node.ssd_dir}" but node.ssd_bytes = 0: give the tier a size, or leave out the folder'
    if settings.gateway.host not in LOOPBACK and not settings.gateway.api_keys_file:
        yield (
            f'gateway.host = "{settings.gateway.host}" is reachable from other machines and gateway.api_keys_file is '
            "empty: set a key file, or bind to 127.0.0.1"
        )
    for key, listen in (("node.listen", node.listen), ("directory.listen", settings.directory.listen)):
        if not _LISTEN.fullmatch(listen) or int(listen.rpartition(":")[2]) > 65535:
            yield f'{key} = "{listen}": expected host:port, e.g. 127.0.0.1:0'
        elif not is_local(listen):
            yield (
                f'{key} = "{listen}" can be reached from other hosts, and what `anabranch up` starts asks nobody for a '
                "secret: bind to 127.0.0.1 (a store of several hosts: `anabranch directory` and `anabranch node`)"
            )


def store_contradictions(settings: Settings) -> Iterator[str]:
    """The same for the sections of the store's own processes."""
    store, security = settings.store, settings.security
    if store.ssd_bytes == 0 and store.ssd_dir:
        yield f'store.ssd_dir = "{store.ssd_dir}" but store.ssd_bytes = 0: give the tier a size (--ssd 100GiB)'
    if settings.write.admission not in ADMISSIONS:
        yield f'write.admission = "{settings.write.admission}": expected one of {", ".join(ADMISSIONS)}'
    listens = [("store.listen", part) for part in store.listen.split("+")]
    for key, listen in (*listens, ("directory.listen", settings.directory.listen)):
        if not _LISTEN.fullmatch(listen) or int(listen.rpartition(":")[2]) > 65535:
            yield f'{key} = "{listen}": expected host:port, e.g. 127.0.0.1:7070'
    tls = {"tls_cert": security.tls_cert, "tls_key": security.tls_key, "tls_ca": security.tls_ca}
    if any(tls.values()) and (missing := [key for key, value in tls.items() if not value]):
        yield f"security.{missing[0]} is empty: TLS needs tls_cert, tls_key and tls_ca"
    directory = settings.directory
    if directory.shard >= directory.shards:
        yield f"directory.shard = {directory.shard}: there are {directory.shards} shards, counted from 0"
    if directory.etcd and directory.listen.startswith(("0.0.0.0:", "[::]:")) and not directory.advertise:
        yield f'directory.listen = "{directory.listen}" is no address to connect to: set directory.advertise'
    if settings.directory.node_ttl_s <= store.heartbeat_s:
        yield (
            f"directory.node_ttl_s = {settings.directory.node_ttl_s:g}s is not longer than store.heartbeat_s = "
            f"{store.heartbeat_s:g}s: every node would be forgotten between two heartbeats"
        )


# --- named flags ------------------------------------------------------------------------------------------------


def flag(section: str, key: str, value: object, name: str) -> list[Entry]:
    """The entry of a named flag; none when it was not given."""
    return [] if value is None else [Entry(section, key, str(value), name, name)]


def role_entries(role: str | None) -> tuple[list[Entry], list[str]]:
    """`--role both`: one colocated engine; `--role split`: prefill and decode engines apart (the default)."""
    match role:
        case None | "split":
            return [], []
        case "both":
            return [
                Entry("cluster", key, value, "--role both", "--role both")
                for key, value in (("prefill", 0), ("decode", 0), ("both", 1))
            ], []
    return [], [f'--role = "{role}": expected one of both, split; engine roles of their own: --prefill N, --decode N']
