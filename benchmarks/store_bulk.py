"""Bulk speed of the store: hand-off, fetch from a peer and read from SSD, beside a plain socket loop in the same run.

    python benchmarks/store_bulk.py [--quick] [--blocks N] [--rounds N]

Two node processes and a directory on loopback, the layout of SmolLM2-135M (Full Blocks of 737,280 bytes), checksums
on. The peer's figure is one process sending to another over loopback with `sendmsg`/`recv_into` and nothing else. The
last line is one JSON object; GB/s are 10^9 bytes a second, best of the rounds and median.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch.blocks.layout import KvLayout
from anabranch.connectors.native import NativePort
from anabranch.engine import kv_port as port
from anabranch.store.config import DirectoryConfig, NodeConfig

LAYOUT = KvLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16)
SHM = Path("/dev/shm")


class Engine:
    """A port and the events that came over it."""

    def __init__(self, root: Path, name: str) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.port = NativePort(f"unix:{root}/{name}.sock", LAYOUT, self.events.put, connect_timeout_s=30.0)

    def take(self, kind: type) -> Any:
        while not isinstance(event := self.events.get(timeout=30.0), kind):
            pass
        return event

    def put(self, keys: list[bytes]) -> list[int]:
        self.port.reserve(1, len(keys))
        slots: list[int] = self.take(port.Reserved).slots
        size = LAYOUT.full_block_bytes
        for slot, key in zip(slots, keys, strict=True):
            self.port.memory[slot * size : slot * size + 32] = key
        parents = [b"", *keys]
        self.port.commit([port.Filled(s, k, p) for s, k, p in zip(slots, keys, parents, strict=False)], tenant="t")
        return slots

    def load(self, keys: list[bytes]) -> int:
        """Blocks loaded (not found in the arena)."""
        self.port.acquire(2, keys, tenant="t", load=True, deadline_s=30.0)
        found = self.take(port.Acquired)
        usable = self.take(port.LoadEnded).usable if found.loading else 0
        self.port.free([*found.ready, *found.loading])
        return usable


def new_keys(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def timed(action: Callable[[], int]) -> float:
    """GB/s of an action that moves that many blocks."""
    start = time.perf_counter()
    blocks = action()
    return blocks * LAYOUT.full_block_bytes / (time.perf_counter() - start) / 1e9


def fetch(source: Engine, target: Engine, blocks: int) -> float:
    keys = new_keys(blocks)
    slots = source.put(keys)
    time.sleep(1.0)  # checksums and write-back out of the way
    speed = timed(lambda: target.load(keys))
    source.port.free(slots)
    return speed


def handoff(source: Engine, target: Engine, name: str, slots: list[int]) -> float:
    target.port.reserve(3, len(slots))
    into = target.take(port.Reserved).slots
    target.port.open_inbound(name, into, first=0, deadline_s=30.0)
    ticket = target.take(port.InboundOpened).ticket

    def run() -> int:
        source.port.open_outbound(name, ticket)
        for layer in range(LAYOUT.layers):
            source.port.push_layer(name, layer, list(zip(slots, range(len(slots)), strict=True)))
        source.port.finish_outbound(name)
        return len(slots) if not target.take(port.InboundEnded).reason else 0

    speed = timed(run)
    source.take(port.OutboundEnded)
    target.port.free(into)
    return speed


def plain_sockets(total: int) -> float:
    """One process to another over loopback, nothing else."""
    listener = socket.create_server(("127.0.0.1", 0))
    code = (
        "import socket,sys\n"
        "s=socket.create_connection(('127.0.0.1',int(sys.argv[1])));b=memoryview(bytearray(1<<20));n=int(sys.argv[2])\n"
        "while n>0: n-=s.sendmsg([b[:min(n,1<<20)]])\n"
        "s.recv(1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(listener.getsockname()[1]), str(total)]):
        sock, _ = listener.accept()
        memory = memoryview(bytearray(total))
        memory[:] = bytes(total)
        at, start = 0, time.perf_counter()
        while at < total:
            at += sock.recv_into(memory[at:])
        spent = time.perf_counter() - start
        sock.sendall(b"x")
        sock.close()
    listener.close()
    return total / spent / 1e9


def member(name: str, root: Path) -> None:
    """What a child process runs."""
    if name == "directory":
        from anabranch.store.live.directory_server import run_directory

        run_directory(DirectoryConfig(listen=f"unix:{root}/directory.sock"))
        return
    from anabranch.store.live.node_server import run_node

    config = NodeConfig(dram_bytes=1 << 30, ssd_bytes=1 << 30, ssd_dir=f"{root}/{name}-ssd")
    run_node(
        name, LAYOUT, config, unix_address=f"unix:{root}/{name}.sock", arena_path=str(SHM / f"{root.name}-{name}"),
        directory_address=f"unix:{root}/directory.sock",
    )  # fmt: skip


def start(name: str, root: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "--member", name, "--root", str(root)])


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20.0)


def measure(root: Path, blocks: int, rounds: int) -> dict[str, list[float]]:
    processes = {name: start(name, root) for name in ("directory", "a", "b")}
    try:
        a, b = Engine(root, "a"), Engine(root, "b")
        warm = max(3, (1 << 30) // LAYOUT.full_block_bytes // blocks + 1)  # until every page of both arenas was touched
        fetches = [fetch(a, b, blocks) for _ in range(warm + rounds)]
        slots = a.put(keys := new_keys(blocks))
        pushes = [handoff(a, b, f"h{i}", slots) for i in range(rounds + 2)]
        a.port.free(slots)
        time.sleep(2.0)
        a.port.close()
        stop(processes["a"])
        (SHM / f"{root.name}-a").unlink()
        stop(processes["directory"])  # so that it is the disk that answers
        processes["a"] = start("a", root)
        again = Engine(root, "a")
        disk = timed(lambda: again.load(keys))
        again.port.close()
        b.port.close()
        sockets = [plain_sockets(blocks * LAYOUT.full_block_bytes) for _ in range(rounds)]
    finally:
        for process in processes.values():
            stop(process)
        for name in ("a", "b"):
            (SHM / f"{root.name}-{name}").unlink(missing_ok=True)
    return {
        "fetch": fetches[warm:],
        "fetch_first_touch": fetches[:1],
        "handoff": pushes[2:],
        "ssd": [disk],
        "plain": sockets,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=250, help="Full Blocks a transfer (250 = 4,000 tokens, 184 MB)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="five rounds")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        member(args.member, args.root)
        return
    root = Path(tempfile.mkdtemp(prefix="anabranch-bulk-"))
    try:
        speeds = measure(root, args.blocks, min(args.rounds, 5) if args.quick else args.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, values in speeds.items():
        print(f"{name:18s} best {max(values):5.2f} GB/s   median {statistics.median(values):5.2f} GB/s")
    median = {name: round(statistics.median(values), 3) for name, values in speeds.items()}
    plain = median.pop("plain")
    result = {
        "claim": "GB/s of hand-off, fetch and SSD read beside a plain loopback socket loop (medians)",
        "ours": median,
        "limit": plain,
        "ratio": {name: round(value / plain, 3) for name, value in median.items()},
        "best": {name: round(max(values), 3) for name, values in speeds.items()},
        "samples": {name: len(values) for name, values in speeds.items()},
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "platform": platform.platform()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
