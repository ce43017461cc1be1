"""The plan of a cluster on one machine: from settings to a ClusterSpec, and from that to processes and their order.

**Covers** names, addresses and order. **Does not cover** folders (`cluster.live.run_folder`) or starting anything
(`cluster.live.supervisor`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

import msgspec

from anabranch.cluster.settings import Settings
from anabranch.cluster.spec import ClusterSpec, Member, ModelChoice
from anabranch.core.config import SWITCHES
from anabranch.core.errors import ConfigError
from anabranch.engine.config import EngineConfig, Role

SPEC_FILE = "cluster.json"
STATE_FILE = "state.json"
LOG_FOLDER = "logs"
LONGEST_SOCKET_PATH = 107
SYNTHETIC = ("tripwire", "paced")

Kind = Literal["directory", "node", "engine", "gateway"]
# `anabranch directory` and `anabranch node` are the store's, for people.
COMMANDS: dict[Kind, str] = {
    "directory": "up-directory",
    "node": "up-node",
    "engine": "engine",
    "gateway": "gateway",
}
START_STAGE: dict[Kind, int] = {"directory": 0, "node": 1, "engine": 2, "gateway": 2}
STOP_STAGE: dict[Kind, int] = {"gateway": 0, "engine": 1, "node": 2, "directory": 3}


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a cluster. `member_id` is what `--id` takes ("" for directory and gateway)."""

    name: str
    kind: Kind
    member_id: str = ""


def plan(
    settings: Settings,
    *,
    run_dir: str,
    data_dir: str,
    arena_dir: str,
    prepared: str,
    port: int,
    cpus: int,
    uid: int,
) -> ClusterSpec:
    """The spec of a cluster on this machine. `port` replaces gateway.port (a free one was chosen for 0).

    Raises ConfigError when the run folder's path is too long for a socket.
    """
    members = [
        _member(
            settings, engine_id, role, run_dir, data_dir, arena_prefix(run_dir, settings.cluster.name, uid, arena_dir)
        )
        for engine_id, role in engine_ids(settings)
    ]
    listen = settings.directory.listen
    spec = ClusterSpec(
        name=settings.cluster.name,
        run_dir=run_dir,
        model=msgspec.structs.replace(settings.model, prepared=prepared),
        members=members,
        directory_address=f"unix:{run_dir}/directory.sock" if listen.endswith(":0") else listen,
        engine=_with_threads(settings.engine, cpus),
        node=settings.node,
        directory=settings.directory,
        gateway=msgspec.structs.replace(settings.gateway, port=port),
        log=settings.log,
    )
    for address in [spec.directory_address] + [m.engine_address for m in members] + [m.node_address for m in members]:
        if address.startswith("unix:") and len(address.encode()) - 5 > LONGEST_SOCKET_PATH:
            raise ConfigError(f'cluster.run_dir = "{run_dir}" is too long for a socket path; choose a shorter one')
    return spec


def engine_ids(settings: Settings) -> Iterator[tuple[str, Role]]:
    roles: list[tuple[Role, int]] = [
        ("prefill", settings.cluster.prefill),
        ("decode", settings.cluster.decode),
        ("both", settings.cluster.both),
    ]
    for role, count in roles:
        for index in range(count):
            yield f"{role}-{index}", role


def arena_prefix(run_dir: str, name: str, uid: int, arena_dir: str) -> str:
    """Every arena of a cluster starts with this, and no arena of another cluster does."""
    place = hashlib.sha256(run_dir.encode()).hexdigest()[:8]
    return f"{arena_dir}/anabranch-{uid}-{name}-{place}."


def processes(spec: ClusterSpec) -> list[Process]:
    """In start order."""
    return [
        Process(name="directory", kind="directory"),
        *(Process(name=f"{m.engine_id}-node", kind="node", member_id=m.engine_id) for m in spec.members),
        *(Process(name=m.engine_id, kind="engine", member_id=m.engine_id) for m in spec.members),
        Process(name="gateway", kind="gateway"),
    ]


def is_synthetic(model: ModelChoice) -> bool:
    """Tripwire and paced models need no files."""
    return model.source in SYNTHETIC


def child_environment(inherited: dict[str, str]) -> dict[str, str]:
    """What every child gets: idle OpenMP threads sleep instead of spinning, output is not buffered, malloc keeps few
    arenas. What the user set stays; ANABRANCH_* settings do not reach children, who read the spec."""
    own = {key: value for key, value in inherited.items() if not key.startswith("ANABRANCH_") or key in SWITCHES}
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "KMP_BLOCKTIME": "0",
        "MALLOC_ARENA_MAX": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
        **own,
        "PYTHONUNBUFFERED": "1",
    }


def _member(settings: Settings, engine_id: str, role: Role, run_dir: str, data_dir: str, arenas: str) -> Member:
    ssd = settings.node.ssd_dir or f"{data_dir}/clusters/{settings.cluster.name}"
    return Member(
        engine_id=engine_id,
        role=role,
        engine_address=f"unix:{run_dir}/{engine_id}.engine.sock",
        node_address=f"unix:{run_dir}/{engine_id}.node.sock",
        arena_path=f"{arenas}{engine_id}",
        ssd_dir=f"{ssd}/{engine_id}",
    )


def _with_threads(engine: EngineConfig, cpus: int) -> EngineConfig:
    """Prefill and decode seldom compute at the same time, so each may use every CPU."""
    return msgspec.structs.replace(engine, threads=engine.threads or max(1, cpus))
