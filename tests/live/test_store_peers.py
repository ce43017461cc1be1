"""Several nodes: fetching from peers, hand-off layer by layer, and what goes wrong in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.engine import kv_port as port
from anabranch.testing.faults import PlannedFaults
from anabranch.testing.store import LAYOUT, Probe, StoreLab, chain, wait_for

SSD_SLOT = 4096 + -(-LAYOUT.full_block_bytes // 4096) * 4096


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[StoreLab]:
    before = threading.active_count()
    with StoreLab(tmp_path) as lab:
        yield lab
    wait_for(lambda: threading.active_count() <= before, "threads to end")


def all_free(lab: StoreLab, *names: str) -> None:
    """Every slot is free or evictable again and nothing is under way."""
    for name in names:
        node = lab.nodes[name]

        def idle(node=node) -> bool:  # type: ignore[no-untyped-def]
            census = node.census()
            busy = sum(
                census[k] for k in ("loads", "lookups", "fetch_leases", "inbound", "outbound", "sinks", "pushes")
            )
            return busy == 0 and census["free_slots"] + census["evictable_slots"] == 64

        wait_for(idle, f"node {name} to be idle, it has {node.census()}")


# --- fetch ------------------------------------------------------------------------------------------------------


def test_blocks_of_another_node_are_fetched_layer_by_layer_and_kept(lab: StoreLab) -> None:
    lab.node("a")
    b = lab.node("b")
    keys = chain("p", 20)
    writer, reader = lab.probe("a"), lab.probe("b")
    writer.put(keys)
    lab.announced(20)
    reader.port.acquire(1, keys, tenant="t", load=True, deadline_s=10)
    found = reader.take(port.Acquired)
    assert (len(found.ready), len(found.loading)) == (0, 20)
    assert [reader.take(port.LayersReady).layers for _ in range(3)] == [1, 2, 3]
    ended = reader.take(port.LoadEnded)
    assert (ended.usable, ended.tiers, ended.reason) == (20, ["peer"] * 20, "")
    assert all(reader.right(slot, key) for slot, key in zip(found.loading, keys, strict=True))
    reader.port.free(found.loading)
    assert reader.count(keys) == ["dram"] * 20
    lab.announced(40)
    assert b.counters["bytes_fetched"] == 20 * LAYOUT.full_block_bytes
    all_free(lab, "a", "b")


def test_a_prefix_comes_from_arena_ssd_and_peer_in_one_load(lab: StoreLab) -> None:
    lab.node("a")
    lab.node("b", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 12)
    lab.probe("a").put(keys)
    old = lab.probe("b")
    old.put(keys[:7])
    old.close()
    lab.settled("b")
    lab.nodes["b"].stop(unlink_arena=True)
    lab.node("b", ssd_bytes=100 * SSD_SLOT)
    lab.announced(12 + 7)
    reader = lab.probe("b")
    assert reader.count(keys[:3]) == ["ssd"] * 3
    tiers = reader.count(keys)
    assert tiers[:3] == ["dram"] * 3
    assert len(tiers) == 12
    assert "peer" in tiers


def test_a_peer_serves_what_it_has_on_ssd_only(lab: StoreLab) -> None:
    lab.node("a", ssd_bytes=100 * SSD_SLOT)
    keys = chain("p", 6)
    old = lab.probe("a")
    old.put(keys)
    old.close()
    lab.settled("a")
    lab.nodes["a"].stop(unlink_arena=True)
    lab.node("a", ssd_bytes=100 * SSD_SLOT)
    lab.node("b")
    lab.announced(6)
    assert lab.probe("b").count(keys) == ["peer"] * 6
    all_free(lab, "a", "b")


def test_s06_no_other_tenant_gets_a_block_from_a_peer(lab: StoreLab) -> None:
    lab.node("a")
    b = lab.node("b")
    keys = chain("p", 5)
    lab.probe("a", tenant="one").put(keys)
    lab.announced(5)
    assert lab.probe("b", tenant="two").count(keys) == []
    assert b.counters["bytes_fetched"] == 0
    assert lab.probe("b", tenant="one").count(chain("x", 1)) == []


@pytest.mark.parametrize(
    ("step", "effect", "where"),
    [
        ("peer.fetch.request", "fail", "b"),
        ("peer.fetch.payload", "fail", "b"),
        ("peer.fetch.payload", "flip", "b"),
        ("peer.serve.header", "fail", "a"),
        ("peer.serve.payload", "fail", "a"),
        ("peer.serve.payload", "short", "a"),
        ("peer.serve.payload", "flip", "a"),
        ("peer.serve.end", "fail", "a"),
        ("directory.lookup", "fail", "b"),
    ],
)
def test_a_faulty_fetch_is_a_miss_and_frees_everything(lab: StoreLab, step: str, effect: str, where: str) -> None:
    faults = {"a": PlannedFaults(), "b": PlannedFaults()}
    lab.node("a", faults=faults["a"])
    lab.node("b", faults=faults["b"])
    keys = chain("p", 5)
    lab.probe("a").put(keys)
    lab.announced(5)
    faults[where].arm(step, effect)
    reader = lab.probe("b")
    assert len(reader.count(keys)) < 5
    assert faults[where].fired[step, effect] == 1
    all_free(lab, "a", "b")


def test_a_block_that_went_bad_in_memory_is_not_passed_on_and_forgotten(lab: StoreLab) -> None:
    a = lab.node("a")
    lab.node("b")
    keys = chain("p", 5)
    writer = lab.probe("a")
    slots = writer.put(keys)
    lab.settled("a")
    lab.announced(5)
    writer.port.memory[slots[2] * LAYOUT.full_block_bytes + 9] ^= 1
    assert lab.probe("b").count(keys) == ["peer"] * 2
    wait_for(lambda: a.counters["integrity_errors"] == 1, "the source to notice")
    assert writer.count(keys) == ["dram"] * 2
    writer.put(keys)
    assert writer.count(keys) == ["dram"] * 5
    all_free(lab, "a", "b")


def test_a_hanging_peer_costs_no_more_than_the_deadline(lab: StoreLab) -> None:
    faults = PlannedFaults()
    lab.node("a", faults=faults)
    b = lab.node("b")
    keys = chain("p", 5)
    lab.probe("a").put(keys)
    lab.announced(5)
    faults.arm("peer.serve.payload", "hang", after=1)
    reader = lab.probe("b")
    reader.port.acquire(1, keys, tenant="t", load=True, deadline_s=0.3)
    loading = reader.take(port.Acquired).loading
    assert reader.take(port.LoadEnded).usable == 0
    assert b.counters["load_deadlines"] == 1
    reader.fill(loading, chain("mine", 5))
    faults.release()
    all_free(lab, "a")
    assert all(reader.right(slot, key) for slot, key in zip(loading, chain("mine", 5), strict=True))
    reader.port.free(loading)
    all_free(lab, "b")


def test_a_cancelled_load_ends_soon(lab: StoreLab) -> None:
    faults = PlannedFaults()
    lab.node("a", faults=faults)
    lab.node("b")
    keys = chain("p", 5)
    lab.probe("a").put(keys)
    lab.announced(5)
    faults.arm("peer.serve.payload", "hang")
    reader = lab.probe("b")
    reader.port.acquire(1, keys, tenant="t", load=True, deadline_s=60)
    loading = reader.take(port.Acquired).loading
    reader.port.cancel_load(1)
    ended = reader.take(port.LoadEnded)
    assert (ended.usable, ended.reason) == (0, "cancelled")
    reader.port.free(loading)
    all_free(lab, "b")


def test_equal_loads_at_the_same_time_move_the_bytes_once(lab: StoreLab) -> None:
    lab.node("a")
    b = lab.node("b")
    keys = chain("p", 10)
    lab.probe("a").put(keys)
    lab.announced(10)
    readers = [lab.probe("b") for _ in range(4)]
    for reader in readers:
        reader.port.acquire(1, keys, tenant="t", load=True, deadline_s=10)
    for reader in readers:
        found = reader.take(port.Acquired)
        if found.loading:
            assert reader.take(port.LoadEnded).usable == len(found.loading)
        slots = found.ready + found.loading
        assert all(reader.right(slot, key) for slot, key in zip(slots, keys, strict=True))
        reader.port.free(slots)
    assert b.counters["committed"] == 10
    all_free(lab, "a", "b")


def test_a_dead_peer_is_a_miss_and_serving_goes_on(lab: StoreLab) -> None:
    lab.node("a")
    lab.node("b")
    keys = chain("p", 5)
    lab.probe("a").put(keys)
    lab.announced(5)
    lab.nodes.pop("a").stop()
    reader = lab.probe("b")
    assert reader.count(keys) == []
    reader.put(keys)
    assert reader.count(keys) == ["dram"] * 5


# --- directory --------------------------------------------------------------------------------------------------


def test_a_new_directory_learns_everything_from_the_nodes(lab: StoreLab) -> None:
    lab.node("a", ssd_bytes=100 * SSD_SLOT)
    lab.node("b")
    keys = chain("p", 8)
    lab.probe("a").put(keys)
    lab.settled("a")
    lab.announced(8)
    lab.restart_directory()
    lab.announced(8)
    assert lab.probe("b").count(keys) == ["peer"] * 8


def test_nodes_work_without_a_directory(tmp_path: Path) -> None:
    with StoreLab(tmp_path) as lab:
        lab.node("a")
        probe = lab.probe("a")
        if lab.directory is not None:
            lab.directory.stop()
            lab.directory = None
        probe.put(chain("p", 3))
        assert probe.count(chain("p", 5)) == ["dram"] * 3


def test_a_lost_announcement_is_noticed_and_repaired(lab: StoreLab) -> None:
    faults = PlannedFaults()
    a = lab.node("a", faults=faults)
    lab.node("b")
    lab.announced(0)
    faults.arm("directory.announce", "fail")
    lab.probe("a").put(chain("p", 4))
    lab.announced(4)
    assert a.counters["resyncs"] == 1


# --- hand-off ---------------------------------------------------------------------------------------------------


def opened(decode: Probe, name: str, count: int, deadline_s: float = 10.0) -> tuple[list[int], port.InboundOpened]:
    slots = decode.reserve(count)
    decode.port.open_inbound(name, slots, first=2, deadline_s=deadline_s)
    return slots, decode.take(port.InboundOpened)


def push(prefill: Probe, name: str, slots: list[int], layers: int = LAYOUT.layers) -> None:
    for layer in range(layers):
        prefill.port.push_layer(name, layer, [(slot, 2 + i) for i, slot in enumerate(slots)])


def test_a_hand_off_arrives_layer_by_layer_and_complete(lab: StoreLab) -> None:
    lab.node("p")
    lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    keys = chain("h", 6)
    mine = prefill.reserve(6)
    prefill.fill(mine, keys)
    slots, event = opened(decode, "h1", 6)
    assert (event.ticket.first, event.ticket.blocks, event.ticket.layers) == (2, 6, 3)
    prefill.port.open_outbound("h1", event.ticket)
    for part in (mine[:4], mine[4:]):
        for layer in range(3):
            prefill.port.push_layer("h1", layer, [(slot, 2 + mine.index(slot)) for slot in part])
    prefill.port.finish_outbound("h1")
    assert decode.take(port.InboundEnded) == port.InboundEnded(handoff="h1")
    assert prefill.take(port.OutboundEnded) == port.OutboundEnded(handoff="h1")
    assert all(decode.right(slot, key) for slot, key in zip(slots, keys, strict=True))
    decode.commit(slots, keys)
    decode.port.free(slots)
    prefill.port.free(mine)
    assert decode.count(keys, load=False) == ["dram"] * 6
    all_free(lab, "p", "d")


def test_a_hand_off_of_nothing_is_complete_at_once(lab: StoreLab) -> None:
    lab.node("p")
    lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    _, event = opened(decode, "h1", 0)
    assert decode.take(port.InboundEnded).reason == ""
    prefill.port.open_outbound("h1", event.ticket)
    prefill.port.finish_outbound("h1")
    assert prefill.take(port.OutboundEnded).reason == ""
    all_free(lab, "p", "d")


def test_an_incomplete_hand_off_fails_on_both_sides(lab: StoreLab) -> None:
    lab.node("p")
    lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.reserve(3)
    slots, event = opened(decode, "h1", 3)
    prefill.port.open_outbound("h1", event.ticket)
    push(prefill, "h1", mine, layers=2)
    prefill.port.finish_outbound("h1")
    assert "before everything" in decode.take(port.InboundEnded).reason
    assert prefill.take(port.OutboundEnded).reason
    decode.port.free(slots)
    prefill.port.free(mine)
    all_free(lab, "p", "d")


def test_s01_a_stale_ticket_is_refused_before_any_byte_is_used(lab: StoreLab) -> None:
    lab.node("p")
    d = lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.put(chain("h", 3), keep=True)
    slots, event = opened(decode, "h1", 3)
    decode.port.abandon("h1")
    assert decode.take(port.InboundEnded).reason == "abandoned"
    decode.fill(slots, chain("other", 3))
    prefill.port.open_outbound("h1", event.ticket)
    push(prefill, "h1", mine)
    prefill.port.finish_outbound("h1")
    assert "stale ticket" in prefill.take(port.OutboundEnded).reason
    assert d.counters["stale_tickets"] == 1
    assert d.counters["bytes_received"] == 0
    assert all(decode.right(slot, key) for slot, key in zip(slots, chain("other", 3), strict=True))
    decode.port.free(slots)
    prefill.port.free(mine)
    all_free(lab, "p", "d")


def test_a_forged_ticket_is_refused(lab: StoreLab) -> None:
    lab.node("p")
    d = lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.reserve(3)
    _, event = opened(decode, "h1", 3)
    forged = type(event.ticket)(
        handoff="h1", secret=bytes(16), address=event.ticket.address, first=2, blocks=3, layers=3, deadline_s=5.0
    )
    prefill.port.open_outbound("h1", forged)
    assert "stale ticket" in prefill.take(port.OutboundEnded).reason
    assert d.counters["stale_tickets"] == 1
    assert d.census()["inbound"] == 1  # the true one may still come
    prefill.port.open_outbound("h2", event.ticket)
    push(prefill, "h2", mine)
    prefill.port.finish_outbound("h2")
    assert decode.take(port.InboundEnded).reason == ""


def test_after_an_abandoned_hand_off_no_byte_lands(lab: StoreLab) -> None:
    faults = PlannedFaults()
    lab.node("p", faults=faults)
    lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.put(chain("h", 3), keep=True)
    slots, event = opened(decode, "h1", 3)
    faults.arm("push.payload", "hang", after=1)
    prefill.port.open_outbound("h1", event.ticket)
    push(prefill, "h1", mine)
    wait_for(lambda: faults.hanging == 1, "the push to hang")
    decode.port.abandon("h1")
    assert decode.take(port.InboundEnded).reason == "abandoned"
    decode.fill(slots, chain("other", 3))
    faults.release()
    prefill.port.finish_outbound("h1")
    assert prefill.take(port.OutboundEnded).reason
    assert all(decode.right(slot, key) for slot, key in zip(slots, chain("other", 3), strict=True))
    decode.port.free(slots)
    prefill.port.free(mine)
    all_free(lab, "p", "d")


@pytest.mark.parametrize(
    ("step", "effect", "where"),
    [
        ("push.open", "fail", "p"),
        ("push.accept", "fail", "d"),
        ("push.header", "fail", "p"),
        ("push.payload", "fail", "p"),
        ("push.payload", "short", "p"),
        ("push.payload", "flip", "p"),
        ("push.receive", "flip", "d"),
        ("push.receive", "fail", "d"),
        ("push.finish", "fail", "p"),
    ],
)
def test_a_faulty_hand_off_fails_with_a_reason_on_both_sides(lab: StoreLab, step: str, effect: str, where: str) -> None:
    faults = {"p": PlannedFaults(), "d": PlannedFaults()}
    lab.node("p", faults=faults["p"])
    d = lab.node("d", faults=faults["d"])
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.put(chain("h", 3), keep=True)
    slots, event = opened(decode, "h1", 3, deadline_s=1.0)
    faults[where].arm(step, effect)
    prefill.port.open_outbound("h1", event.ticket)
    push(prefill, "h1", mine)
    prefill.port.finish_outbound("h1")
    assert prefill.take(port.OutboundEnded).reason
    assert decode.take(port.InboundEnded).reason
    assert d.counters["integrity_errors"] == (effect == "flip")
    decode.port.free(slots)
    prefill.port.free(mine)
    all_free(lab, "p", "d")


def test_a_push_that_never_began_is_reported_to_the_receiver_before_its_deadline(lab: StoreLab) -> None:
    faults = PlannedFaults()
    lab.node("p", faults=faults)
    d = lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    slots, event = opened(decode, "h1", 3, deadline_s=600.0)
    faults.arm("push.open", "fail")
    prefill.port.open_outbound("h1", event.ticket)
    prefill.port.finish_outbound("h1")
    assert prefill.take(port.OutboundEnded).reason
    assert "failed" in decode.take(port.InboundEnded).reason
    assert d.counters["stale_tickets"] == 0
    decode.port.free(slots)
    all_free(lab, "p", "d")


def test_s10_a_producer_that_dies_halfway_ends_the_hand_off_at_once(lab: StoreLab) -> None:
    lab.node("p")
    lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.put(chain("h", 6), keep=True)
    slots, event = opened(decode, "h1", 6)
    prefill.port.open_outbound("h1", event.ticket)
    push(prefill, "h1", mine[:3])
    wait_for(lambda: lab.nodes["d"].counters["bytes_received"] >= 3 * LAYOUT.full_block_bytes, "half of it")
    lab.nodes.pop("p").stop()
    assert decode.take(port.InboundEnded, timeout_s=5.0).reason
    assert prefill.take(port.OutboundEnded).reason == "the node is gone"
    decode.port.free(slots)
    all_free(lab, "d")


def test_a_hand_off_that_nobody_pushes_ends_at_its_deadline(lab: StoreLab) -> None:
    lab.node("d")
    decode = lab.probe("d")
    slots, _ = opened(decode, "h1", 2, deadline_s=0.1)
    assert decode.take(port.InboundEnded).reason == "deadline passed"
    decode.port.free(slots)
    all_free(lab, "d")


def test_an_engine_that_leaves_takes_its_hand_offs_with_it(lab: StoreLab) -> None:
    lab.node("p")
    lab.node("d")
    prefill, decode = lab.probe("p"), lab.probe("d")
    mine = prefill.put(chain("h", 3), keep=True)
    _, event = opened(decode, "h1", 3)
    prefill.port.open_outbound("h1", event.ticket)
    push(prefill, "h1", mine, layers=1)
    decode.close()
    prefill.port.finish_outbound("h1")
    assert prefill.take(port.OutboundEnded).reason
    prefill.port.free(mine)
    all_free(lab, "p", "d")
