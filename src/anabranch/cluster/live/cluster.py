"""A whole cluster on this machine as one object: what `anabranch up` runs and what live tests drive."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from anabranch.cluster import local
from anabranch.cluster.live import probes
from anabranch.cluster.live.capacity import SHARED_MEMORY, busy_port
from anabranch.cluster.live.child import ChildPlan, ChildStatus
from anabranch.cluster.live.run_folder import RunFolder, RunState, default_data_dir, default_run_dir
from anabranch.cluster.live.supervisor import OnEvent, Supervisor
from anabranch.cluster.settings import Settings, contradictions
from anabranch.cluster.spec import ClusterSpec, ModelChoice
from anabranch.core.config import refuse
from anabranch.core.errors import ConfigError, MissingExtra, Unavailable
from anabranch.core.live.process import resident_bytes
from anabranch.serving.live.access import load_keys

START_TIMEOUT_S = 180.0
# (extra, module, whether a synthetic model needs it too)
NEEDED = (
    ("serve", "starlette", True),
    ("serve", "uvicorn", True),
    ("serve", "httptools", True),
    ("serve", "prometheus_client", True),
    ("serve", "tokenizers", False),
    ("serve", "jinja2", False),
    ("engine", "torch", False),
    ("engine", "numpy", False),
    ("engine", "safetensors", False),
)
Progress = Callable[[str, float], None]


class LocalCluster:
    """`with LocalCluster(settings) as cluster: …cluster.url…`; leaving the block stops everything in order.

    Settings are used as they are: files and environment have been read before. `start` raises ConfigError before
    anything runs, Unavailable (with a log's tail) when a process cannot start.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        progress: Progress | None = None,
        on_change: Callable[[list[ChildStatus]], None] = lambda _: None,
        on_event: OnEvent = lambda _, __: None,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._on_change = on_change
        self._on_event = on_event
        self.folder = RunFolder(default_run_dir(settings.cluster), settings.cluster.name)
        self._spec: ClusterSpec | None = None
        self._supervisor: Supervisor | None = None
        self._stopping = threading.Lock()

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self, *, timeout_s: float = START_TIMEOUT_S, cancelled: threading.Event | None = None) -> None:
        """Prepare the model, start every process, return when all are ready (or `cancelled` is set)."""
        refuse(contradictions(self._settings))
        require_extras(self._settings.model)
        gateway = self._settings.gateway
        load_keys(gateway)
        if (problem := busy_port(gateway.host, gateway.port)) is not None:
            raise ConfigError(problem)
        self.folder.acquire()
        try:
            self._spec = self._plan(self._prepare())
            path = self.folder.write(local.SPEC_FILE, self._spec)
            self._supervisor = Supervisor(
                self._child_plans(self._spec, path),
                self.folder.path / local.LOG_FOLDER,
                on_change=self._changed,
                on_event=self._on_event,
            )
            self._supervisor.start(timeout_s=timeout_s, cancelled=cancelled)
        except BaseException:
            self.stop(keep_logs=True)
            raise

    def wait(self, stop: threading.Event) -> None:
        """Until `stop` is set. Raises Unavailable if the supervision itself breaks down: nothing runs then."""
        while not stop.wait(0.5):
            if self._running.failure:
                raise Unavailable(self._running.failure)

    def stop(self, *, keep_logs: bool = False) -> None:
        """Gateway (drained), engines, nodes, directory; then the run folder. Safe to call twice."""
        with self._stopping:
            if self._supervisor is not None:
                self._supervisor.stop()
            self.folder.release(keep_logs=keep_logs)

    def kill_all(self) -> None:
        """Cut a stop short: SIGKILL to every process."""
        if self._supervisor is not None:
            self._supervisor.kill_all()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- what tests and commands ask ----------------------------------------------------------------------------

    @property
    def spec(self) -> ClusterSpec:
        if self._spec is None:
            raise Unavailable("the cluster has not been started")
        return self._spec

    @property
    def url(self) -> str:
        return url_of(self.spec)

    @property
    def data_dir(self) -> Path:
        return default_data_dir(self._settings.cluster)

    def statuses(self) -> list[ChildStatus]:
        return self._running.statuses()

    def status(self, process: str) -> ChildStatus:
        return next(status for status in self.statuses() if status.name == process)

    def signal(self, process: str, number: signal.Signals) -> int:
        """Send a signal to one process ("directory", "gateway", "prefill-0", "prefill-0-node", …); returns its pid."""
        return self._running.signal(process, number)

    def kill(self, process: str) -> int:
        """SIGKILL one process; the supervisor restarts it. Returns the process id that died."""
        return self.signal(process, signal.SIGKILL)

    def wait_ready(self, *, timeout_s: float = 30.0, but: Sequence[int] = ()) -> None:
        """Until every process is ready and none of the process ids in `but` is left. Raises Unavailable."""
        good = self._running.wait_until(
            lambda statuses: all(s.state == "ready" and s.pid not in but for s in statuses), timeout_s
        )
        if not good:
            raise Unavailable(f"not ready: {[s.name for s in self.statuses() if s.state != 'ready' or s.pid in but]}")

    def census(self) -> dict[str, dict[str, int]]:
        """What each process holds right now, by its own account. Raises Unavailable if one does not answer."""
        spec = self.spec
        counts = {"directory": probes.stat(spec.directory_address).census}
        for member in spec.members:
            counts[f"{member.engine_id}-node"] = probes.stat(member.node_address).census
            load = probes.engine_load(member.engine_address)
            held = load.total_slots - load.free_slots
            counts[member.engine_id] = {"waiting": load.waiting, "running": load.running, "slots": held}
        return counts

    def resident_bytes(self) -> int:
        """Memory of all processes and the supervisor, shared pages counted once."""
        return sum(resident_bytes(status.pid) for status in self.statuses()) + resident_bytes(os.getpid())

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Supervisor:
        if self._supervisor is None:
            raise Unavailable("the cluster has not been started")
        return self._supervisor

    def _prepare(self) -> str:
        model = self._settings.model
        if local.is_synthetic(model) or model.prepared:
            return model.prepared
        from anabranch.engine.live.prepare import prepare  # needs the extra "engine"

        return str(
            prepare(
                model.source,
                self.data_dir / "models",
                kv_dtype=model.kv_dtype,
                block_tokens=self._settings.engine.block_tokens,
                progress=self._progress,
            )
        )

    def _plan(self, prepared: str) -> ClusterSpec:
        gateway = self._settings.gateway
        spec = local.plan(
            self._settings,
            run_dir=str(self.folder.path),
            data_dir=str(self.data_dir),
            arena_dir=SHARED_MEMORY,
            prepared=prepared,
            port=gateway.port or free_port(gateway.host),
            cpus=len(os.sched_getaffinity(0)),
            uid=os.getuid(),
        )
        for member in spec.members:
            Path(member.ssd_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        return spec

    def _child_plans(self, spec: ClusterSpec, spec_path: Path) -> list[ChildPlan]:
        environment = local.child_environment(dict(os.environ))
        return [
            ChildPlan(
                name=process.name,
                kind=process.kind,
                argv=command(process, spec_path),
                ready=readiness(process, spec),
                start_stage=local.START_STAGE[process.kind],
                stop_stage=local.STOP_STAGE[process.kind],
                grace_s=spec.gateway.drain_timeout_s + 5.0 if process.kind == "gateway" else 10.0,
                environment=environment,
            )
            for process in local.processes(spec)
        ]

    def _changed(self, statuses: list[ChildStatus]) -> None:
        state = RunState(name=self.spec.name, supervisor_pid=os.getpid(), url=self.url, children=statuses)
        try:
            self.folder.write(local.STATE_FILE, state)
        except OSError as error:
            self._on_event("supervisor", f"cannot write {local.STATE_FILE}, `anabranch status` will be wrong: {error}")
        self._on_change(statuses)


def require_extras(model: ModelChoice) -> None:
    """Raises MissingExtra for the first module that a process of the cluster would miss."""
    for extra, module, synthetic_too in NEEDED:
        if (synthetic_too or not local.is_synthetic(model)) and importlib.util.find_spec(module) is None:
            raise MissingExtra(extra, module)


def command(process: local.Process, spec_path: Path) -> list[str]:
    """How to run one process of a cluster."""
    argv = [sys.executable, "-m", "anabranch", local.COMMANDS[process.kind], "--spec", str(spec_path)]
    if process.member_id:
        argv += ["--id", process.member_id]
    return [*argv, "--parent", str(os.getpid())]


def readiness(process: local.Process, spec: ClusterSpec) -> Callable[[], bool]:
    """Ask a process itself whether it serves."""
    member = next((m for m in spec.members if m.engine_id == process.member_id), None)
    if process.kind == "gateway":
        return lambda: probes.http_status(spec.gateway.host, spec.gateway.port, "/health/ready") == 200
    if member is None:
        return lambda: probes.answers(spec.directory_address, probes.stat)
    if process.kind == "node":
        return lambda: probes.answers(member.node_address, probes.stat)
    return lambda: probes.answers(member.engine_address, probes.engine_hello)


def url_of(spec: ClusterSpec) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(spec.gateway.host, spec.gateway.host)
    return f"http://[{host}]:{spec.gateway.port}" if ":" in host else f"http://{host}:{spec.gateway.port}"


def free_port(host: str) -> int:
    """A port that is free now, below the range from which the system gives connections theirs: one of ours could get
    it before the gateway has bound it. Raises Unavailable."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    for _ in range(200):
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((where[0], port, *where[2:]))
            except OSError:
                continue
            return port
    raise Unavailable(f"no free port on {host}; name one with --port")


def tripwire_settings(folder: Path, *, prefill: int = 1, decode: int = 1, both: int = 0, **gateway: int) -> Settings:
    """Settings of a small test cluster under `folder`: synthetic model, any free port, little memory."""
    base = Settings()
    replace = msgspec.structs.replace
    return replace(
        base,
        model=replace(base.model, source="tripwire"),
        cluster=replace(
            base.cluster,
            name="test",
            prefill=prefill,
            decode=decode,
            both=both,
            run_dir=str(folder / "run"),
            data_dir=str(folder / "data"),
        ),
        node=replace(base.node, dram_bytes=32 << 20, ssd_bytes=64 << 20),
        gateway=replace(base.gateway, port=0, drain_timeout_s=5.0, **gateway),
    )
