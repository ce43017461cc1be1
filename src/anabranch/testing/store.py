"""A small store on loopback for tests: directory, nodes and engine ports, with real sockets and files."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from anabranch.blocks.layout import KvLayout
from anabranch.connectors.native import NativePort
from anabranch.core.errors import DeadlineExceeded
from anabranch.core.faults import NO_FAULTS, Faults
from anabranch.engine import kv_port as port
from anabranch.store.config import DirectoryConfig, NodeConfig
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.node_server import NodeServer

LAYOUT = KvLayout(layers=3, kv_heads=2, head_dim=8, block_tokens=16)
WAIT_S = 20.0
E = TypeVar("E")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Raises DeadlineExceeded if the condition does not come true."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise DeadlineExceeded(f"timed out waiting for {what}")
        time.sleep(0.005)


def block_bytes(key: bytes, size: int) -> bytes:
    """What the block named `key` must hold: a function of the name."""
    return hashlib.shake_128(key).digest(size)


def chain(name: str, count: int) -> list[bytes]:
    """Keys of a made-up prompt."""
    return [hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(count)]


class Probe:
    """An engine that does nothing but use its port. Events pile up until somebody takes them."""

    def __init__(self, address: str, layout: KvLayout = LAYOUT, tenant: str = "t") -> None:
        self._events: list[Any] = []
        self._arrived = threading.Condition()
        self.layout = layout
        self.tenant = tenant
        self._op = 0
        self.port = NativePort(address, layout, self._sink)

    def _sink(self, event: Any) -> None:
        with self._arrived:
            self._events.append(event)
            self._arrived.notify_all()

    def take(self, kind: type[E], timeout_s: float = WAIT_S) -> E:
        """The oldest event of this kind. Raises DeadlineExceeded."""
        end = time.monotonic() + timeout_s
        with self._arrived:
            while True:
                for event in self._events:
                    if isinstance(event, kind):
                        self._events.remove(event)
                        return event
                if not self._arrived.wait(max(end - time.monotonic(), 0.0)):
                    raise DeadlineExceeded(f"no {kind.__name__} came, only {self._events}")

    def reserve(self, count: int) -> list[int]:
        self._op += 1
        self.port.reserve(self._op, count)
        return self.take(port.Reserved).slots

    def fill(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        """Write what `keys` must hold into slots."""
        size = self.layout.full_block_bytes
        for slot, key in zip(slots, keys, strict=True):
            self.port.memory[slot * size : (slot + 1) * size] = block_bytes(key, size)

    def put(self, keys: Sequence[bytes], *, keep: bool = False) -> list[int]:
        """Compute, publish and (unless `keep`) free a prompt's blocks."""
        slots = self.reserve(len(keys))
        self.fill(slots, keys)
        self.commit(slots, keys)
        if not keep:
            self.port.free(slots)
        self.flush()
        return slots

    def flush(self) -> None:
        """Wait until the node has seen everything said so far."""
        self._op += 1
        self.port.acquire(self._op, [], tenant=self.tenant, load=False, deadline_s=WAIT_S)
        self.take(port.Acquired)

    def commit(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        parents = [b"", *keys]
        blocks = [port.Filled(s, k, p) for s, k, p in zip(slots, keys, parents, strict=False)]
        self.port.commit(blocks, tenant=self.tenant)

    def get(
        self, keys: Sequence[bytes], *, load: bool = True, deadline_s: float = WAIT_S
    ) -> tuple[list[int], list[str]]:
        """Acquire, and wait for the load: (usable slots, tier of each). The caller frees them; unusable ones are."""
        self._op += 1
        self.port.acquire(self._op, keys, tenant=self.tenant, load=load, deadline_s=deadline_s)
        found = self.take(port.Acquired)
        tiers = ["dram"] * len(found.ready)
        if not found.loading:
            return found.ready, tiers
        ended = self.take(port.LoadEnded)
        self.port.free(found.loading[ended.usable :])
        return [*found.ready, *found.loading[: ended.usable]], tiers + ended.tiers

    def count(self, keys: Sequence[bytes], **how: Any) -> list[str]:
        """`get`, check every byte, free: the tiers. Raises ValueError if a block is wrong."""
        slots, tiers = self.get(keys, **how)
        for slot, key in zip(slots, keys, strict=False):
            if not self.right(slot, key):
                raise ValueError(f"slot {slot} holds other bytes than block {key.hex()[:8]}")
        self.port.free(slots)
        return tiers

    def right(self, slot: int, key: bytes) -> bool:
        size = self.layout.full_block_bytes
        return self.port.memory[slot * size : (slot + 1) * size] == block_bytes(key, size)

    def close(self) -> None:
        self.port.close()


class StoreLab:
    """Nodes are named; a stopped node can be started again on the same arena and files. Use as a context manager."""

    def __init__(
        self, directory: Path, *, layout: KvLayout = LAYOUT, slots: int = 64, with_directory: bool = True
    ) -> None:
        self._root = directory
        self.layout = layout
        self._slots = slots
        self.nodes: dict[str, NodeServer] = {}
        self._probes: list[Probe] = []
        self._faults: list[Any] = []
        self.directory = DirectoryServer(self._directory_config()).start() if with_directory else None

    def _directory_config(self) -> DirectoryConfig:
        return DirectoryConfig(listen=f"unix:{self._root}/directory.sock")

    def node(
        self, name: str, *, faults: Faults = NO_FAULTS, layout: KvLayout | None = None, **config: Any
    ) -> NodeServer:
        """Start a node. Keywords override NodeConfig; `ssd_bytes` 0 by default."""
        layout = layout or self.layout
        dram = 2 * 4096 + self._slots * (layout.full_block_bytes + 96)
        settings: dict[str, Any] = {
            "dram_bytes": dram,
            "ssd_bytes": 0,
            "ssd_dir": str(self._root / f"{name}-ssd"),
            "heartbeat_s": 0.1,
            **config,
        }
        self._faults.append(faults)
        server = NodeServer(
            name,
            layout,
            NodeConfig(**settings),
            unix_address=f"unix:{self._root}/{name}.sock",
            arena_path=str(self._root / f"{name}.arena"),
            directory_address=self.directory.address if self.directory is not None else "",
            faults=faults,
        ).start()
        self.nodes[name] = server
        if self.directory is not None:
            wait_for(lambda: server.node.loads.directory_up, "the directory")
        return server

    def probe(self, name: str, tenant: str = "t") -> Probe:
        probe = Probe(f"unix:{self._root}/{name}.sock", self.layout, tenant)
        self._probes.append(probe)
        return probe

    def restart_directory(self) -> None:
        """Everything it knew is lost."""
        if self.directory is not None:
            self.directory.stop()
            self.directory = DirectoryServer(self._directory_config()).start()

    def settled(self, name: str) -> None:
        """Wait until every write-back of the node is done."""
        wait_for(lambda: self.nodes[name].node.writeback.pending == 0, "write-back")

    def announced(self, blocks: int) -> None:
        """Wait until the directory knows this many blocks (each node's counted)."""
        directory = self.directory
        if directory is not None:
            wait_for(lambda: directory.stat().census["blocks"] == blocks, f"{blocks} announced blocks")

    def close(self) -> None:
        for faults in self._faults:
            if hasattr(faults, "release"):
                faults.release()
        for probe in self._probes:
            probe.close()
        for node in self.nodes.values():
            node.stop()
        if self.directory is not None:
            self.directory.stop()

    def __enter__(self) -> StoreLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
