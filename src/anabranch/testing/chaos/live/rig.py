"""A whole cluster in one process: directory, nodes, engines in threads, the gateway's dispatcher; faults at every step.

**Covers** building it, what it holds (`census`), what it says about a request (`story`), the scan of every named block,
restarts of parts. **Does not cover** traffic (`live.campaign`).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from anabranch.connectors.native import NativePort
from anabranch.engine.config import EngineConfig, Role
from anabranch.engine.live.server import Engine
from anabranch.engine.runner import ModelInfo, ModelRunner
from anabranch.engine.tripwire import TripwireRunner, tripwire_info
from anabranch.store.config import DirectoryConfig, NodeConfig
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.node_server import NodeServer
from anabranch.testing.chaos.faults import CampaignFaults
from anabranch.testing.chaos.live.tamper import PortCutter, Tamper, Tickets
from anabranch.testing.chaos.report import unsettled
from anabranch.transfer.live.arena import PAGE, RECORD

MEMBERS: tuple[tuple[str, Role], ...] = (
    ("prefill-0", "prefill"),
    ("prefill-1", "prefill"),
    ("decode-0", "decode"),
    ("decode-1", "decode"),
)
SHARED_MEMORY = "/dev/shm"


class RigConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`slots`: arena of each node; `ssd_slots`: its SSD tier. Timeouts are short, so that faults do not stretch it."""

    slots: int = 72
    ssd_slots: int = 160
    fault_scale: float = 1.0
    peer_timeout_s: float = 1.0
    lease_s: float = 3.0
    engine: EngineConfig = EngineConfig(
        step_tokens=256, max_running=24, handoff_timeout_s=5.0, load_timeout_s=3.0, spare_slots=4
    )


class Rig:
    """Use as a context manager. Everything lives in one temporary folder, which goes at the end."""

    def __init__(
        self,
        seed: int,
        config: RigConfig | None = None,
        info: ModelInfo | None = None,
        runner: Callable[[ModelInfo, memoryview], ModelRunner] = TripwireRunner,
    ) -> None:
        self._runner = runner
        self.config = config or RigConfig()
        self.info = info or tripwire_info()
        self.faults = {
            name: CampaignFaults(seed * 1000 + i, scale=self.config.fault_scale) for i, (name, _) in enumerate(MEMBERS)
        }
        self.nodes: dict[str, NodeServer] = {}
        self.engines: dict[str, Engine] = {}
        self.tampers: dict[str, Tamper] = {}
        self._cutters: list[PortCutter] = []
        self.tickets: Tickets = deque(maxlen=256)
        self.past: Counter[str] = Counter()
        self._folder = tempfile.TemporaryDirectory(prefix="anabranch-chaos-")
        self.root = Path(self._folder.name)
        self._before = threading.active_count(), len(os.listdir("/proc/self/fd"))

    def __enter__(self) -> Rig:
        try:
            self.directory = DirectoryServer(self._directory_config()).start()
            for name, role in MEMBERS:
                self.start_node(name)
                self.start_engine(name, role)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def addresses(self) -> list[str]:
        """Where a gateway finds the engines, each behind its man in the middle."""
        return [self.address(name) for name, _ in MEMBERS]

    # --- parts --------------------------------------------------------------------------------------------------

    def start_node(self, name: str) -> None:
        layout = self.info.layout
        config = NodeConfig(
            dram_bytes=2 * PAGE + self.config.slots * (layout.full_block_bytes + RECORD.size),
            ssd_bytes=self.config.ssd_slots * (PAGE + -(-layout.full_block_bytes // PAGE) * PAGE),
            ssd_dir=str(self.root / f"{name}-ssd"),
            peer_timeout_s=self.config.peer_timeout_s,
            lease_s=self.config.lease_s,
            heartbeat_s=0.2,
        )
        self.nodes[name] = NodeServer(
            name,
            layout,
            config,
            unix_address=f"unix:{self.root}/{name}.node.sock",
            arena_path=self._arena(name),
            directory_address=self.directory.address,
            faults=self.faults[name],
        ).start()

    def stop_node(self, name: str) -> None:
        """As a restart of its process would: engines keep their pages, a successor finds arena and files."""
        node = self.nodes.pop(name)
        try:
            node.stop()
        finally:
            self.past.update({key: int(value) for key, value in node.counters.items()})

    def start_engine(self, name: str, role: Role) -> None:
        info, layout, port = self.info, self.info.layout, f"unix:{self.root}/{name}.port.sock"
        self._cutters.append(PortCutter(port, f"unix:{self.root}/{name}.node.sock", self.faults[name]))
        self.engines[name] = Engine(
            engine_id=name,
            role=role,
            address=self._engine_address(name),
            config=self.config.engine,
            info=info,
            identity=info.digest,
            port_factory=lambda sink: NativePort(port, layout, sink),
            runner_factory=lambda memory: self._runner(info, memory),
        )
        self.tampers[name] = Tamper(self.address(name), self._engine_address(name), self.faults[name], self.tickets)

    def restart_directory(self) -> None:
        self.directory.stop()
        self.directory = DirectoryServer(self._directory_config()).start()

    def close(self) -> None:
        for faults in self.faults.values():
            faults.off()
        for tamper in self.tampers.values():
            tamper.close()
        for engine in self.engines.values():
            engine.close()
        for cutter in self._cutters:
            cutter.close()
        for name in list(self.nodes):
            self.stop_node(name)
        if hasattr(self, "directory"):
            self.directory.stop()
        for name, _ in MEMBERS:
            Path(self._arena(name)).unlink(missing_ok=True)
        self._folder.cleanup()

    # --- views --------------------------------------------------------------------------------------------------

    def census(self) -> dict[str, int]:
        """What is held and should not be when nothing runs; {} when all is quiet."""
        held: dict[str, int] = {}
        for name, engine in self.engines.items():
            held.update({f"{name}.{key}": count for key, count in engine.core.census().items() if count})
        for name, node in self.nodes.items():
            held.update(unsettled(f"{name}-node", node.census()))
        return held

    def leftovers(self) -> dict[str, int]:
        """After `close`: threads and file descriptors beyond those from before the rig was made."""
        threads, files = self._before
        left = {"threads": threading.active_count() - threads, "files": len(os.listdir("/proc/self/fd")) - files}
        return {key: count for key, count in left.items() if count > 0}

    def check(self) -> None:
        """Raise what made a part fail, and InvariantBroken if a node's books do not add up. Only when quiet."""
        for engine in self.engines.values():
            if engine.worker.failure is not None:
                raise engine.worker.failure
        for node in self.nodes.values():
            if node.failure is not None:
                raise node.failure
            node.node.book.pool.check()

    def counters(self) -> Counter[str]:
        """Counters of all nodes, former lives included, and of all engines ("engine.…")."""
        total = Counter(self.past)
        for node in self.nodes.values():
            total.update({key: int(value) for key, value in node.counters.items()})
        for engine in self.engines.values():
            total.update({f"engine.{key}": int(value) for key, value in engine.core.load().counters.items()})
        return total

    def fired(self) -> Counter[tuple[str, str]]:
        total: Counter[tuple[str, str]] = Counter()
        for faults in self.faults.values():
            total.update(faults.fired)
        return total

    def story(self, request_id: str) -> list[str]:
        lines: list[str] = []
        for name, engine in self.engines.items():
            for attempt in range(1, 5):
                lines += [f"{name} {line}" for line in _story(engine, f"{request_id}/{attempt}")]
        return lines

    def _directory_config(self) -> DirectoryConfig:
        return DirectoryConfig(listen=f"unix:{self.root}/directory.sock", node_ttl_s=2.0)

    def _engine_address(self, name: str) -> str:
        return f"unix:{self.root}/{name}.engine.sock"

    def address(self, name: str) -> str:
        """Where a gateway finds one engine."""
        return f"unix:{self.root}/{name}.front.sock"

    def _arena(self, name: str) -> str:
        return f"{SHARED_MEMORY}/{self.root.name}.{name}"


def _story(engine: Engine, attempt: str, tries: int = 20) -> list[str]:
    """The engine's thread may be writing its log; try again then."""
    for _ in range(tries):
        try:
            return engine.core.story(attempt)
        except RuntimeError:
            time.sleep(0.001)
    return ["(the log did not hold still)"]
