"""SIGKILL of node processes under load: nothing wrong is ever served, and what was safe is found again."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.core.errors import DeadlineExceeded
from anabranch.engine import kv_port as port
from anabranch.testing.store import LAYOUT, Probe, StoreLab, chain, wait_for

NODE = """
import sys
from anabranch.store.config import NodeConfig
from anabranch.store.live.node_server import run_node
from anabranch.testing.store import LAYOUT
name, root, directory = sys.argv[1:4]
run_node(
    name, LAYOUT, NodeConfig(dram_bytes=500_000, ssd_bytes=1 << 20, ssd_dir=f"{root}/{name}-ssd", heartbeat_s=0.1),
    unix_address=f"unix:{root}/{name}.sock", arena_path=f"{root}/{name}.arena", directory_address=directory,
)
"""
KILLS = 6


class NodeProcess:
    def __init__(self, name: str, root: Path, directory: str = "") -> None:
        self._command = [sys.executable, "-c", NODE, name, str(root), directory]
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def restart(self) -> None:
        self._process = subprocess.Popen(self._command)

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(20)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    process = NodeProcess("n", tmp_path)
    yield process
    assert process.stop() == 0


def test_s14_kills_at_any_moment_never_leave_a_wrong_block(node: NodeProcess, tmp_path: Path) -> None:
    draw = random.Random(14)
    probe = Probe(f"unix:{tmp_path}/n.sock")
    served = 0
    try:
        for round_ in range(KILLS):
            until = time.monotonic() + draw.uniform(0.0, 0.15)
            turn = 0
            while time.monotonic() < until:
                served += put_and_get(probe, f"{round_}/{turn}", draw)
                turn += 1
            node.kill()
            probe.take(port.PortLost)
            node.restart()
            probe.take(port.PortBack)
            probe.port.free([slot for slot, count in probe.port.held.items() for _ in range(count)])
            for known in range(8):
                served += len(probe.count(chain(f"{round_}/{known}", 12)))
        assert served > 0
        # Write-back may pin a few blocks for a moment.
        wait_for(lambda: len(probe.reserve(probe.port.total_slots)) > 0, "every slot to be free")
    finally:
        probe.close()


def put_and_get(probe: Probe, name: str, draw: random.Random) -> int:
    """One turn of an agent; what it reads is checked byte by byte."""
    keys = chain(name, 12)
    slots = probe.reserve(draw.randrange(1, 13))
    probe.fill(slots, keys[: len(slots)])
    probe.commit(slots, keys[: len(slots)])
    probe.port.free(slots)
    return len(probe.count(keys))


def test_what_was_written_to_disk_is_found_after_a_kill_and_a_lost_arena(node: NodeProcess, tmp_path: Path) -> None:
    keys = chain("p", 20)
    writer = Probe(f"unix:{tmp_path}/n.sock")
    writer.put(keys)
    wait_for(lambda: (tmp_path / "n-ssd").exists(), "the SSD tier")
    reader = Probe(f"unix:{tmp_path}/n.sock")
    writer.close()
    wait_for(lambda: stored(tmp_path) >= 20, "write-back")
    reader.close()
    node.kill()
    (tmp_path / "n.arena").unlink()
    node.restart()
    late = Probe(f"unix:{tmp_path}/n.sock")
    assert late.count(keys) == ["ssd"] * 20
    late.close()


def stored(root: Path) -> int:
    """Headers on disk."""
    return sum(segment.read_bytes().count(b"ANBRSSD1") for segment in (root / "n-ssd").glob("*.seg"))


def test_s10_a_killed_producer_ends_the_hand_off_and_the_consumer_goes_on(tmp_path: Path) -> None:
    producer = NodeProcess("p", tmp_path)
    with StoreLab(tmp_path, with_directory=False) as lab:
        d = lab.node("d")
        decode, prefill = lab.probe("d"), Probe(f"unix:{tmp_path}/p.sock")
        mine = prefill.put(chain("h", 6), keep=True)
        slots = decode.reserve(6)
        decode.port.open_inbound("h", slots, first=0, deadline_s=30.0)
        ticket = decode.take(port.InboundOpened).ticket
        prefill.port.open_outbound("h", ticket)
        for layer in range(LAYOUT.layers):
            prefill.port.push_layer("h", layer, [(slot, i) for i, slot in enumerate(mine[:3])])
        wait_for(lambda: d.counters["bytes_received"] >= 3 * LAYOUT.full_block_bytes, "three blocks")
        producer.kill()
        assert decode.take(port.InboundEnded, timeout_s=10.0).reason
        assert prefill.take(port.OutboundEnded).reason
        assert isinstance(prefill.take(port.PortLost), port.PortLost)
        decode.fill(slots, chain("h", 6))  # recomputed
        decode.commit(slots, chain("h", 6))
        decode.port.free(slots)
        assert decode.count(chain("h", 6)) == ["dram"] * 6
        prefill.close()


def test_a_killed_node_of_a_stopped_peer_costs_a_miss_only(tmp_path: Path) -> None:
    with StoreLab(tmp_path) as lab:
        assert lab.directory is not None
        remote = NodeProcess("r", tmp_path, lab.directory.address)
        lab.node("n", peer_timeout_s=0.3)
        far, near = Probe(f"unix:{tmp_path}/r.sock"), lab.probe("n")
        keys = chain("p", 5)
        far.put(keys)
        lab.announced(5)
        assert near.count(keys[:2]) == ["peer"] * 2
        remote._process.send_signal(signal.SIGSTOP)
        assert near.count(keys, deadline_s=1.0) == ["dram"] * 2
        remote.kill()
        assert near.count(keys, deadline_s=5.0) == ["dram"] * 2
        with pytest.raises(DeadlineExceeded):
            far.take(port.PortBack, timeout_s=0.0)
        far.close()
