"""How a running cluster is doing, asked from outside: its state file, and each process over its own protocol."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from anabranch.cluster.live import probes
from anabranch.cluster.live.child import ChildStatus
from anabranch.cluster.live.entry import served_name
from anabranch.cluster.live.run_folder import read_spec, read_state, supervisor_pid
from anabranch.cluster.spec import ClusterSpec
from anabranch.core.errors import Unavailable
from anabranch.core.live.process import is_alive, resident_bytes


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process. `health`: "ok", its state while it is not ready, or why it does not answer. `resident_bytes` counts
    shared pages in equal parts. `load`: what it says about itself."""

    name: str
    kind: str
    pid: int
    state: str
    health: str
    restarts: int
    up_s: float
    resident_bytes: int
    load: dict[str, float] = {}


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    url: str
    model: str
    supervisor_pid: int
    resident_bytes: int
    processes: list[ProcessReport]

    @property
    def healthy(self) -> bool:
        return all(process.health == "ok" for process in self.processes)


def survey(run_dir: Path, name: str) -> ClusterReport:
    """Raises Unavailable when no cluster runs in `run_dir`."""
    pid, state = supervisor_pid(run_dir), read_state(run_dir)
    if pid is None or state is None:
        raise Unavailable(f"no cluster named '{name}' is running; start one with `anabranch up --name {name}`")
    spec = read_spec(run_dir)
    with ThreadPoolExecutor(max_workers=max(1, len(state.children))) as pool:
        processes = list(pool.map(lambda child: _report(child, spec), state.children))
    return ClusterReport(
        name=state.name,
        url=state.url,
        model=served_name(spec),
        supervisor_pid=pid,
        resident_bytes=resident_bytes(pid) + sum(process.resident_bytes for process in processes),
        processes=processes,
    )


def _report(child: ChildStatus, spec: ClusterSpec) -> ProcessReport:
    load: dict[str, float] = {}
    health: str = child.state
    if child.state == "ready":
        try:
            load, health = _ask(child, spec), "ok"
        except Unavailable as error:
            health = str(error) if is_alive(child.pid) else "dead"
    return ProcessReport(
        name=child.name,
        kind=child.kind,
        pid=child.pid,
        state=child.state,
        health=health,
        restarts=child.restarts,
        up_s=max(0.0, time.time() - child.since_s) if child.pid else 0.0,
        resident_bytes=resident_bytes(child.pid) if child.pid else 0,
        load=load,
    )


def _ask(child: ChildStatus, spec: ClusterSpec) -> dict[str, float]:
    """What the process says about itself. Raises Unavailable."""
    if child.kind == "gateway":
        code = probes.http_status(spec.gateway.host, spec.gateway.port, "/health/ready")
        if code != 200:
            raise Unavailable("not ready" if code else "does not answer")
        return {}
    if child.kind == "directory":
        return {key: float(value) for key, value in probes.stat(spec.directory_address).census.items()}
    member = next(m for m in spec.members if child.name in (m.engine_id, f"{m.engine_id}-node"))
    if child.kind == "node":
        return {key: float(value) for key, value in probes.stat(member.node_address).census.items()}
    load = probes.engine_load(member.engine_address)
    names = ("waiting", "running", "waiting_tokens", "free_slots", "total_slots", "steps", "preemptions")
    return {name: float(getattr(load, name)) for name in names}
