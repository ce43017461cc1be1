"""One node and its engines: ownership over the wire, crashes on either side, the SSD tier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.core.errors import ConfigError, LayoutMismatch
from anabranch.engine import kv_port as port
from anabranch.store import writeback
from anabranch.testing.faults import PlannedFaults
from anabranch.testing.store import LAYOUT, Probe, StoreLab, chain, wait_for

SSD_SLOT = 4096 + -(-LAYOUT.full_block_bytes // 4096) * 4096


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[StoreLab]:
    before = threading.active_count()
    with StoreLab(tmp_path, with_directory=False) as lab:
        yield lab
    wait_for(lambda: threading.active_count() <= before, "threads to end")


def settled_free(lab: StoreLab, name: str, slots: int) -> None:
    node = lab.nodes[name]
    wait_for(lambda: node.census()["free_slots"] + node.census()["evictable_slots"] == slots, "all slots to be usable")


def test_a_committed_block_is_found_by_another_engine_without_a_copy(lab: StoreLab) -> None:
    lab.node("n")
    writer, reader = lab.probe("n"), lab.probe("n")
    keys = chain("p", 5)
    slots = writer.put(keys)
    found, tiers = reader.get([*keys, *chain("other", 2)])
    assert found == slots
    assert tiers == ["dram"] * 5
    assert all(reader.right(slot, key) for slot, key in zip(found, keys, strict=True))
    reader.port.free(found)
    assert writer.count(chain("other", 3)) == []
    settled_free(lab, "n", 64)


def test_a_reserve_gives_all_or_nothing_and_evicts_children_first(lab: StoreLab) -> None:
    lab.node("n")
    probe = lab.probe("n")
    keys = chain("p", 40)
    probe.put(keys)
    lab.settled("n")  # a block whose checksum is being computed is referenced
    slots = probe.reserve(50)
    assert len(slots) == 50
    assert probe.reserve(50) == []
    assert len(probe.count(keys)) == 14
    probe.port.free(slots)
    settled_free(lab, "n", 64)


def test_another_tenant_finds_nothing(lab: StoreLab) -> None:
    lab.node("n", ssd_bytes=64 * SSD_SLOT)
    keys = chain("p", 4)
    lab.probe("n", tenant="a").put(keys)
    assert lab.probe("n", tenant="b").count(keys) == []
    lab.settled("n")
    assert lab.probe("n", tenant="b").count(keys) == []


def test_an_engine_of_another_layout_is_refused_with_the_reason(lab: StoreLab, tmp_path: Path) -> None:
    lab.node("n")
    with pytest.raises(LayoutMismatch, match="another layout"):
        Probe(f"unix:{tmp_path}/n.sock", layout=type(LAYOUT)(layers=4, kv_heads=2, head_dim=8, block_tokens=16))


def test_double_frees_and_foreign_commits_are_refused_and_counted(lab: StoreLab) -> None:
    node = lab.node("n")
    owner, other = lab.probe("n"), lab.probe("n")
    slots = owner.put(chain("p", 2))
    other.port.commit([port.Filled(slots[0], chain("x", 1)[0], b"")], tenant="t")
    wait_for(lambda: node.counters["commits_refused"] == 1, "the refusal")
    assert other.count(chain("x", 1)) == []


def test_s12_writers_of_one_key_share_one_copy_and_different_bytes_are_counted(lab: StoreLab) -> None:
    node = lab.node("n")
    keys = chain("p", 1)
    writers = [lab.probe("n") for _ in range(9)]
    reserved = [writer.reserve(1) for writer in writers]
    for writer, slots in zip(writers, reserved, strict=True):
        writer.fill(slots, keys)
    size = LAYOUT.full_block_bytes
    writers[8].port.memory[reserved[8][0] * size] ^= 1
    for writer, slots in zip(writers, reserved, strict=True):
        writer.commit(slots, keys)
    wait_for(lambda: node.counters["commit_duplicates"] == 8 and node.node.writeback.pending == 0, "nine commits")
    assert node.counters["commit_conflicts"] == 1
    for writer, slots in zip(writers, reserved, strict=True):
        writer.port.free(slots)
    assert writers[8].count(keys) == ["dram"]
    settled_free(lab, "n", 64)
    assert node.census()["cached_slots"] == 1


ENGINE = """
import sys, time
from anabranch.testing.store import Probe, chain
probe = Probe(sys.argv[1])
probe.put(chain("done", 2))
slots = probe.reserve(60)
probe.fill(slots[:1], chain("late", 1))
print("reserved", flush=True)
time.sleep(600)
"""


def test_s11_slots_of_a_killed_writer_are_free_again_and_its_block_is_a_clean_miss(
    lab: StoreLab, tmp_path: Path
) -> None:
    lab.node("n")
    with subprocess.Popen([sys.executable, "-c", ENGINE, f"unix:{tmp_path}/n.sock"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"reserved\n"
        probe = lab.probe("n")
        assert probe.count(chain("late", 1)) == []
        assert probe.reserve(20) == []
        writer.send_signal(signal.SIGSTOP)
        assert probe.reserve(20) == []  # a stopped process still owns its slots
        writer.kill()
    settled_free(lab, "n", 64)
    slots = probe.put(chain("late", 1), keep=True)
    assert probe.count(chain("late", 1)) == ["dram"]
    probe.port.free(slots)
    assert probe.count(chain("done", 2)) == ["dram"] * 2


def test_a_live_engine_keeps_its_slots_over_a_restart_of_the_node(lab: StoreLab) -> None:
    lab.node("n")
    probe = lab.probe("n")
    named, private = chain("p", 3), chain("q", 2)
    held = probe.put(named, keep=True)
    mine = probe.reserve(2)
    probe.fill(mine, private)
    lab.settled("n")
    lab.nodes["n"].stop()
    probe.take(port.PortLost)
    probe.port.acquire(77, named, tenant="t", load=True, deadline_s=1)
    assert probe.take(port.Acquired) == port.Acquired(op=77, ready=[], loading=[])
    probe.port.reserve(78, 1)  # waits for the node
    node = lab.node("n")
    assert probe.take(port.PortBack).lost == []
    (later,) = probe.take(port.Reserved).slots
    assert later not in held + mine
    assert node.census()["awaited_sessions"] == 0
    assert probe.count(named) == ["dram"] * 3
    probe.commit(mine, private)
    probe.port.free([*held, *mine, later])
    assert probe.count(private) == ["dram"] * 2
    settled_free(lab, "n", 64)


def test_a_broken_connection_to_a_live_node_loses_nothing(lab: StoreLab) -> None:
    node = lab.node("n")
    probe = lab.probe("n")
    keys = chain("p", 3)
    held = probe.put(keys, keep=True)
    inbound = probe.reserve(2)
    probe.port.open_inbound("h", inbound, first=0, deadline_s=60.0)
    probe.take(port.InboundOpened)
    (link,) = node._connections
    link.close("cut")
    assert probe.take(port.InboundEnded).reason == "the node is gone"
    assert probe.take(port.PortLost).reason
    assert probe.take(port.PortBack).lost == []
    wait_for(lambda: node.census()["inbound"] == 0, "the hand-off to be void")
    probe.port.free([*held, *inbound])
    assert probe.count(keys) == ["dram"] * 3
    settled_free(lab, "n", 64)
    assert node.counters["bad_frees"] == 0


def test_a_damaged_arena_block_loses_its_name_at_the_restart(lab: StoreLab) -> None:
    lab.node("n")
    probe = lab.probe("n")
    keys = chain("p", 3)
    slots = probe.put(keys)
    lab.settled("n")
    probe.port.memory[slots[1] * LAYOUT.full_block_bytes + 7] ^= 1
    lab.nodes["n"].stop()
    node = lab.node("n")
    probe.take(port.PortBack)
    assert probe.count(keys) == ["dram"]
    assert node.counters["integrity_errors"] == 1


def test_an_arena_of_another_layout_is_made_anew(lab: StoreLab) -> None:
    lab.node("n")
    lab.probe("n").put(chain("p", 3))
    lab.settled("n")
    lab.nodes["n"].stop()
    other = type(LAYOUT)(layers=2, kv_heads=2, head_dim=8, block_tokens=16)
    assert lab.node("n", layout=other).census()["cached_slots"] == 0


def test_what_was_committed_but_not_written_is_written_by_the_successor(lab: StoreLab) -> None:
    lab.node("n")
    probe = lab.probe("n")
    keys = chain("p", 6)
    probe.put(keys)
    lab.settled("n")
    lab.nodes["n"].stop()
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    probe.take(port.PortBack)
    lab.settled("n")
    probe.close()
    lab.nodes["n"].stop(unlink_arena=True)
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    assert lab.probe("n").count(keys) == ["ssd"] * 6


# --- SSD --------------------------------------------------------------------------------------------------------


def restart(lab: StoreLab, tmp_path: Path, name: str = "n", **config: object) -> None:
    """A new node process on the same SSD files but without the arena."""
    lab.settled(name)
    lab.nodes[name].stop(unlink_arena=True)
    lab.node(name, **config)


def test_blocks_come_back_from_ssd_after_a_restart(lab: StoreLab, tmp_path: Path) -> None:
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 30)
    writer = lab.probe("n")
    writer.put(keys)
    lab.settled("n")
    writer.close()
    restart(lab, tmp_path, ssd_bytes=100 * SSD_SLOT)
    node = lab.nodes["n"]
    assert node.counters["recovered_ssd"] == 30
    assert lab.probe("n").count(keys) == ["ssd"] * 30
    assert node.counters["ssd_reads"] <= 6
    assert lab.probe("n").count(keys) == ["dram"] * 30
    assert all(os.stat(f).st_mode & 0o077 == 0 for f in (tmp_path / "n-ssd").iterdir())


def flip(directory: Path, slot: int, at: int) -> None:
    """Change one byte of an SSD slot."""
    segments = sorted(directory.glob("*.seg"))
    per_segment = segments[0].stat().st_size // SSD_SLOT
    with open(segments[slot // per_segment], "r+b") as file:
        file.seek(slot % per_segment * SSD_SLOT + at)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("at", [4096, 4096 + LAYOUT.full_block_bytes - 1, 20])
def test_s16_a_flipped_byte_on_disk_ends_the_prefix_there(lab: StoreLab, tmp_path: Path, at: int) -> None:
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 8)
    writer = lab.probe("n")
    writer.put(keys)
    lab.settled("n")
    writer.close()
    index = lab.nodes["n"].node.ssd
    assert index is not None
    place = index.pool.match(keys)[5]
    lab.nodes["n"].stop(unlink_arena=True)
    flip(tmp_path / "n-ssd", place, at)
    node = lab.node("n", ssd_bytes=100 * SSD_SLOT)
    probe = lab.probe("n")
    assert probe.count(keys) == ["ssd"] * 5
    assert node.counters["integrity_errors"] == (at >= 4096)
    slots = probe.put(keys, keep=True)  # recomputed
    lab.settled("n")
    assert probe.count(keys) == ["dram"] * 8
    probe.port.free(slots)


def test_s02_a_failed_read_ends_the_usable_prefix_and_nothing_behind_it_is_published(
    lab: StoreLab, tmp_path: Path
) -> None:
    faults = PlannedFaults()
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 8)
    writer = lab.probe("n")
    writer.put(keys)
    lab.settled("n")
    writer.close()
    lab.nodes["n"].stop(unlink_arena=True)
    ssd_dir = tmp_path / "n-ssd"
    flip(ssd_dir, 5, 4096 + 3)
    node = lab.node("n", ssd_bytes=100 * SSD_SLOT, faults=faults)
    probe = lab.probe("n")
    probe.port.acquire(500, keys, tenant="t", load=True, deadline_s=10)
    found = probe.take(port.Acquired)
    assert len(found.loading) == 8
    ended = probe.take(port.LoadEnded)
    assert (ended.usable, ended.tiers) == (5, ["ssd"] * 5)
    assert ended.reason
    assert node.census()["cached_slots"] == 5
    probe.port.free(found.loading)
    assert probe.count(keys, load=False) == ["dram"] * 5


@pytest.mark.parametrize("effect", ["fail", "short", "flip"])
def test_a_faulty_read_is_a_miss_and_never_wrong(lab: StoreLab, tmp_path: Path, effect: str) -> None:
    faults = PlannedFaults()
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 6)
    writer = lab.probe("n")
    writer.put(keys)
    writer.close()
    lab.settled("n")
    lab.nodes["n"].stop(unlink_arena=True)
    lab.node("n", ssd_bytes=100 * SSD_SLOT, faults=faults)
    faults.arm("ssd.read", effect)
    probe = lab.probe("n")
    assert len(probe.count(keys)) < 6
    assert faults.fired["ssd.read", effect] == 1
    settled_free(lab, "n", 64)


@pytest.mark.parametrize("effect", ["short", "flip"])
def test_a_torn_or_damaged_write_is_never_served(lab: StoreLab, tmp_path: Path, effect: str) -> None:
    faults = PlannedFaults()
    faults.arm("ssd.write", effect, after=2)
    lab.node("n", ssd_bytes=100 * SSD_SLOT, faults=faults)
    keys = chain("p", 4)
    writer = lab.probe("n")
    writer.put(keys)
    writer.close()
    restart(lab, tmp_path, ssd_bytes=100 * SSD_SLOT)
    assert lab.probe("n").count(keys) == ["ssd"] * 2


def test_s17_a_hanging_read_ends_at_the_deadline_and_its_late_end_writes_nowhere(lab: StoreLab) -> None:
    faults = PlannedFaults()
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 6)
    writer = lab.probe("n")
    writer.put(keys)
    writer.close()
    lab.settled("n")
    lab.nodes["n"].stop(unlink_arena=True)
    node = lab.node("n", ssd_bytes=100 * SSD_SLOT, faults=faults)
    faults.arm("ssd.read", "hang")
    probe = lab.probe("n")
    probe.port.acquire(900, keys, tenant="t", load=True, deadline_s=0.3)
    loading = probe.take(port.Acquired).loading
    assert probe.take(port.LoadEnded).usable == 0
    probe.fill(loading, chain("mine", 6))
    other = lab.probe("n")
    assert other.count(keys) == ["ssd"] * 6  # the second reader goes on
    faults.release()
    wait_for(lambda: faults.hanging == 0 and not node.ssd.reading, "the late read to end")  # type: ignore[union-attr]
    assert all(probe.right(slot, key) for slot, key in zip(loading, chain("mine", 6), strict=True))
    probe.port.free(loading)
    settled_free(lab, "n", 64)


def test_s17_with_every_reader_stuck_the_disk_is_left_out(lab: StoreLab) -> None:
    faults = PlannedFaults()
    lab.node("n", ssd_bytes=100 * SSD_SLOT)
    prompts = [chain(name, 3) for name in "pqr"]
    writer = lab.probe("n")
    for keys in prompts:
        writer.put(keys)
    writer.close()
    lab.settled("n")
    lab.nodes["n"].stop(unlink_arena=True)
    node = lab.node("n", ssd_bytes=100 * SSD_SLOT, faults=faults)
    faults.arm("ssd.read", "hang", times=2)
    probe = lab.probe("n")
    for keys in prompts[:2]:
        assert probe.count(keys, deadline_s=0.1) == []
    wait_for(lambda: node.stat().state["ssd"] == "stuck", "the readers to count as stuck")
    wait_for(lambda: not node.node.loads.ssd_up, "the brain to know")
    assert probe.count(prompts[2], deadline_s=60.0) == []  # at once
    probe.put(prompts[2])
    assert probe.count(prompts[2]) == ["dram"] * 3
    faults.release()
    wait_for(lambda: node.stat().state["ssd"] == "ok" and node.node.loads.ssd_up, "the readers to come back")
    assert probe.count(prompts[0]) == ["ssd"] * 3


def usage(directory: Path) -> int:
    return sum(item.stat().st_blocks * 512 for item in directory.iterdir())


def test_s14_the_disk_limit_holds_with_leftover_and_foreign_files(lab: StoreLab, tmp_path: Path) -> None:
    limit = 20 * SSD_SLOT
    directory = tmp_path / "n-ssd"
    lab.node("n", ssd_bytes=limit)
    first = chain("p", 18)
    writer = lab.probe("n")
    writer.put(first)
    writer.close()
    restart(lab, tmp_path, ssd_bytes=limit)
    probe = lab.probe("n")
    assert probe.count(first) == ["ssd"] * 18
    for i in range(10):
        probe.put(chain(f"more{i}", 5))
        lab.settled("n")
        assert usage(directory) <= limit + SSD_SLOT
    node = lab.nodes["n"]
    assert node.census()["ssd_blocks"] == 20
    assert node.counters["evicted_ssd"] >= 40
    probe.close()
    node.stop(unlink_arena=True)
    del lab.nodes["n"]
    (directory / "theirs").write_bytes(bytes(5 * SSD_SLOT))
    assert lab.node("n", ssd_bytes=limit).ssd.slots == 15  # type: ignore[union-attr]
    assert usage(directory) <= limit
    assert len(lab.probe("n").count(first)) <= 15
    lab.nodes.pop("n").stop()
    (directory / "theirs").write_bytes(bytes(20 * SSD_SLOT))
    with pytest.raises(ConfigError, match="raise ssd_bytes"):
        lab.node("n", ssd_bytes=limit)


def test_a_limit_below_one_segment_of_before_starts_anew(lab: StoreLab, tmp_path: Path) -> None:
    lab.node("n", ssd_bytes=320 * SSD_SLOT)  # segments of 20 blocks
    probe = lab.probe("n")
    probe.put(chain("p", 4))
    lab.settled("n")
    probe.close()
    restart(lab, tmp_path, ssd_bytes=10 * SSD_SLOT)
    assert lab.nodes["n"].ssd.slots == 10  # type: ignore[union-attr]
    assert usage(tmp_path / "n-ssd") <= 10 * SSD_SLOT


def test_s15_a_full_file_system_pauses_writes_visibly_and_reads_go_on(lab: StoreLab) -> None:
    faults = PlannedFaults()
    node = lab.node("n", ssd_bytes=32 * SSD_SLOT, faults=faults)  # segments of two blocks
    probe = lab.probe("n")
    keys = chain("p", 4)
    probe.put(keys)
    lab.settled("n")
    faults.arm("ssd.grow", "fail", times=1)
    probe.put(chain("q", 1))
    lab.settled("n")
    assert (node.counters["ssd_full"], node.counters["evicted_ssd"]) == (1, 1)  # one forced eviction, one retry
    assert node.census()["ssd_blocks"] == 4
    assert node.stat().state["ssd"] == "ok"
    probe.put(chain("r", 1))
    lab.settled("n")
    assert node.counters["evicted_ssd"] == 2
    assert node.census()["ssd_blocks"] == 4
    assert probe.count(keys) == ["dram"] * 4


def test_s15_a_disk_without_room_for_anything_pauses_and_resumes(
    lab: StoreLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "PAUSE_S", 0.2)
    faults = PlannedFaults()
    node = lab.node("n", ssd_bytes=32 * SSD_SLOT, faults=faults)
    probe = lab.probe("n")
    faults.arm("ssd.grow", "fail", times=2)
    keys = chain("p", 2)
    probe.put(keys)
    wait_for(lambda: node.counters["ssd_pauses"] == 1, "the pause")
    assert node.census()["ssd_blocks"] == 0
    assert probe.count(keys) == ["dram"] * 2
    wait_for(lambda: node.stat().state["ssd"] == "ok", "the end of the pause")
    probe.put(chain("q", 3))
    wait_for(lambda: node.census()["ssd_blocks"] >= 3, "writes to resume")


def test_a_second_node_on_one_ssd_directory_is_refused(lab: StoreLab, tmp_path: Path) -> None:
    lab.node("n", ssd_bytes=20 * SSD_SLOT)
    with pytest.raises(ConfigError, match="in use by another node"):
        lab.node("m", ssd_bytes=20 * SSD_SLOT, ssd_dir=str(tmp_path / "n-ssd"))
    lab.nodes.pop("m", None)
