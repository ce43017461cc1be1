"""A value node with an SSD and a backing tier: what goes down, how it comes up, and what a stuck disk does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from value_lanes import MIB, Caller, NodeRig, arena_path, name, until

from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.contracts import Record
from anabranch.store.values.live import node_loader
from anabranch.store.values.live.log.value_log import ValueLog
from anabranch.store.values.messages import Exists, Invalidate, Prefetch, Remove, Verify
from anabranch.store.values.outcome import Outcome

OK, PRESENT, DIFFERS, MISSING = Outcome.OK, Outcome.PRESENT, Outcome.DIFFERS, Outcome.MISSING
Start = Callable[..., NodeRig]


class MemoryTier:
    """Both contracts of lower tiers, in a dict; `gate` closed: calls hang."""

    def __init__(self) -> None:
        self.values: dict[bytes, tuple[Record, bytes]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0
        self.answer = OK
        self.gone: list[bytes] = []

    def append(self, batch: Sequence[tuple[Record, memoryview]], *, durable: bool = False) -> list[Outcome]:
        self.gate.wait(60)
        if self.answer is OK:
            self.values.update((record.name, (record, bytes(data))) for record, data in batch)
        return [self.answer] * len(batch)

    store = append

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self.reads += 1
        self.gate.wait(60)
        for one, view in zip(names, into, strict=True):
            view[:] = self.values[one][1]
        return [OK] * len(names)

    load = read

    @property
    def count(self) -> int:
        return len(self.values)

    def record(self, one: bytes) -> Record | None:
        return self.values[one][0] if one in self.values else None

    def present(self, names: bytes) -> bytes:
        return bytes(names[at : at + 32] in self.values for at in range(0, len(names), 32))

    def remove(self, names: Sequence[bytes]) -> list[Outcome]:
        return [OK if self.values.pop(one, None) else MISSING for one in names]

    def invalidate(self, scopes: Sequence[bytes]) -> int:
        gone = [one for one, (record, _) in self.values.items() if record.scope in scopes]
        for one in gone:
            del self.values[one]
        return len(gone)

    def names(self) -> Iterable[bytes]:
        return list(self.values)

    def take_evicted(self) -> list[bytes]:
        gone, self.gone = self.gone, []
        return gone

    def refresh(self) -> int:
        return 0

    state = ""
    used_bytes = 0

    def close(self) -> None: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    rigs: list[NodeRig] = []

    def make(admission: str = "all", dram: int = 8 * MIB, **more: Any) -> NodeRig:
        config = StoreConfig(dram_bytes=dram, listen="127.0.0.1:0", eviction="lru")
        writes = WriteConfig(admission=admission, **more.pop("writes", {}))
        rigs.append(NodeRig(tmp_path, arena_path(f"t{len(rigs)}"), config, writes=writes, **more))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.node.stop()


def push_out(caller: Caller, count: int = 8) -> None:
    """Large values, and more small ones than small ones have room for."""
    for _ in range(count):
        assert caller.put([name()], [bytes(MIB)]) == [OK]
    for _ in range(4):
        assert caller.put([name() for _ in range(15)], [bytes(60_000)] * 15) == [OK] * 15


def test_values_return_from_a_real_log_also_after_a_restart(start: Start, tmp_path: Path) -> None:
    log = ValueLog(str(tmp_path / "ssd"), 64 * MIB)
    rig = start(disk=log)
    caller = Caller(rig.node.address)
    names, values = [name() for _ in range(6)], [os.urandom(n) for n in (1, 100, 5000, 100_000, MIB, 2 * MIB + 3)]
    for one, value in zip(names, values, strict=True):
        assert caller.put_large([one], [value]) == [OK]
    until(lambda: rig.counter("ssd_written") == 6, "all are written")
    push_out(caller)
    assert caller.ask(Exists(op=1, names=b"".join(names))).tiers == bytes([2] * 6)
    assert caller.put([names[1]], [b"different"]) == [DIFFERS]
    assert caller.put_large([names[4]], [values[4]]) == [PRESENT]
    found = caller.find(names[:4], limit=MIB)
    assert found.tiers == bytes([1] * 4)
    caller.lane.receive_into([memoryview(bytearray(sum(found.sizes)))])
    assert [caller.get_large(one) for one in names] == values
    done = caller.ask(Verify(op=1))
    assert done.places["ssd/damaged"] == 0 < done.places["ssd/good"]
    caller.close()
    rig.node.stop()
    log.close()
    log = ValueLog(str(tmp_path / "ssd"), 64 * MIB)
    rig.again(disk=log)
    caller = Caller(rig.node.address)
    assert [caller.get_large(one) for one in names] == values
    assert caller.ask(Remove(op=1, names=names[0])).outcomes == bytes([OK])
    assert caller.get([names[0]]) == [MISSING]
    places = caller.ask(Invalidate(op=1, everywhere=False)).places
    assert places["n1/ssd"] >= 5
    assert caller.get(names[:2]) == [MISSING] * 2
    caller.close()
    log.close()


def test_a_second_use_earns_a_place_on_the_disk(start: Start) -> None:
    tier = MemoryTier()
    caller = Caller((rig := start("second-use", disk=tier)).node.address)
    once, twice = name(), name()
    caller.put([once, twice], [b"once", b"twice"])
    caller.get([twice])
    until(lambda: rig.counter("ssd_written") == 1, "it is written")
    assert list(tier.values) == [twice]
    caller.close()


def test_what_is_evicted_goes_down_and_removed_copies_do_not(start: Start) -> None:
    tier = MemoryTier()
    caller = Caller((rig := start("evicted", disk=tier)).node.address)
    one, other = name(), name()
    caller.put([one], [b"kept"])
    push_out(caller)
    until(lambda: one in tier.values, "it went down")
    assert caller.get([one]) == [b"kept"]
    tier.gate.clear()
    caller.put([other], [b"removed"])
    push_out(caller, 10)
    until(lambda: rig.census()["writes_waiting"] > 0, "writes wait")
    assert caller.get([other]) == [MISSING]
    remover = Caller(rig.node.address)
    thread = threading.Thread(target=lambda: remover.ask(Remove(op=1, names=other)))
    thread.start()
    tier.gate.set()
    thread.join()
    push_out(caller)
    until(lambda: rig.census()["writes_waiting"] == 0, "the queue is empty")
    assert other not in tier.values
    assert caller.get([other]) == [MISSING]
    caller.close()
    remover.close()


def test_durable_is_on_disk_before_the_answer(start: Start) -> None:
    tier = MemoryTier()
    caller = Caller((start("second-use", disk=tier)).node.address)
    one, large, value = name(), name(), os.urandom(2 * MIB)
    assert caller.put([one], [b"small"], durable=True) == [OK]
    assert one in tier.values
    assert caller.put_large([large], [value], durable=True) == [OK]
    assert large in tier.values
    plain = name()
    assert caller.put([plain], [b"x"]) == [OK]
    assert caller.put([plain], [b"x"], durable=True) == [PRESENT]
    assert plain in tier.values
    tier.answer = Outcome.FULL
    assert caller.put([name()], [b"y"], durable=True) == [Outcome.FULL]
    caller.close()


def test_a_value_that_left_the_disk_is_written_again(start: Start) -> None:
    tier = MemoryTier()
    rig = start("evicted", disk=tier)
    caller = Caller(rig.node.address)
    one, two = name(), name()
    assert caller.put([one, two], [b"x", b"y"], durable=True) == [OK, OK]
    del tier.values[one], tier.values[two]  # evicted
    assert caller.put([one], [b"x"], durable=True) == [PRESENT]
    assert one in tier.values
    tier.gone.append(two)
    until(lambda: not tier.gone, "the node has asked what left")
    push_out(caller)
    until(lambda: two in tier.values, "it is written on its way out of DRAM")
    caller.close()


def test_without_a_disk_the_backing_tier_makes_durable(start: Start) -> None:
    tier = MemoryTier()
    caller = Caller(start("second-use", backing=tier).node.address)
    one, large, value = name(), name(), os.urandom(2 * MIB)
    assert caller.put([one], [b"small"], durable=True) == [OK]
    assert one in tier.values
    assert caller.put_large([large], [value], durable=True) == [OK]
    assert large in tier.values
    tier.answer = Outcome.UNREACHABLE
    assert caller.put([name()], [b"y"], durable=True) == [Outcome.UNREACHABLE]
    caller.close()


def test_with_neither_nothing_is_durable_nor_stored(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    rig = start()
    caller = Caller(rig.node.address)
    one, two = name(), name()
    assert caller.put([one], [b"x"], durable=True) == [Outcome.DENIED]
    assert caller.offer([two], [2 * MIB], durable=True).outcomes == bytes([Outcome.DENIED])
    assert caller.ask(Exists(op=1, names=one + two)).tiers == bytes(2)
    assert rig.census()["used_bytes"] == 0
    assert rig.counter("durable_refused") == 2
    assert len([r for r in caplog.records if "--backing" in r.message]) == 1
    assert caller.put([one], [b"x"]) == [OK]
    caller.close()


def test_a_full_queue_drops_and_counts(start: Start) -> None:
    tier = MemoryTier()
    tier.gate.clear()
    rig = start("all", disk=tier, writes={"queue_bytes": 2 * MIB})
    caller = Caller(rig.node.address)
    for _ in range(6):
        caller.put([name()], [os.urandom(MIB)])
    until(lambda: rig.counter("ssd_dropped_queue_full") > 0, "some are dropped")
    assert rig.census()["writes_waiting_bytes"] <= 2 * MIB
    tier.gate.set()
    until(lambda: rig.census()["writes_waiting"] == 0, "the rest is written")
    assert rig.counter("ssd_written") + rig.counter("ssd_dropped_queue_full") + rig.counter("ssd_dropped_gone") == 6
    caller.close()


def test_loads_of_one_name_share_and_a_stuck_one_is_left(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """S17."""
    tier = MemoryTier()
    rig = start("all", disk=tier)
    caller = Caller(rig.node.address)
    one, value = name(), os.urandom(1000)
    caller.put([one], [value])
    until(lambda: one in tier.values, "it is written")
    push_out(caller)
    tier.gate.clear()
    readers = [Caller(rig.node.address) for _ in range(3)]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda r=r: results.extend(r.get([one]))) for r in readers]
    before = tier.reads
    for thread in threads:
        thread.start()
    until(lambda: tier.reads == before + 1, "one reads")
    here = name()
    caller.put([here], [b"others go on"])
    assert caller.get([here]) == [b"others go on"]
    tier.gate.set()
    for thread in threads:
        thread.join()
    assert results == [value] * 3
    assert tier.reads == before + 1
    push_out(caller)
    tier.gate.clear()
    monkeypatch.setattr(node_loader.Loader.load, "__defaults__", (0.05,))
    assert readers[0].get([one]) == [Outcome.UNREACHABLE]
    push_out(caller)
    assert rig.census()["loads"] == 1
    tier.gate.set()
    until(lambda: rig.census()["loads"] == 0, "the late read ends")
    assert caller.get([one]) == [value]
    for reader in [*readers, caller]:
        reader.close()
    until(lambda: rig.census()["lanes"] == 0, "lanes end")
    until(lambda: rig.census()["held_bytes"] == 0, "writes end")
    assert rig.census()["reserved_bytes"] == 0


def test_a_removed_value_does_not_come_back_with_a_late_load(start: Start) -> None:
    tier = MemoryTier()
    rig = start("all", disk=tier)
    caller, reader = Caller(rig.node.address), Caller(rig.node.address)
    one = name()
    caller.put([one], [b"value"])
    until(lambda: one in tier.values, "it is written")
    push_out(caller)
    tier.gate.clear()
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(reader.get([one])))
    thread.start()
    until(lambda: rig.census()["loads"] == 1, "it is being read")
    assert caller.ask(Remove(op=1, names=one)).outcomes == bytes([OK])
    tier.values[one] = (Record(one, bytes(16), 5, (0,)), b"value")
    tier.gate.set()
    thread.join()
    assert results == [Outcome.STALE]
    assert caller.get([one]) == [MISSING]
    caller.close()
    reader.close()


def test_the_backing_tier_serves_what_no_node_has(start: Start) -> None:
    tier = MemoryTier()
    rig = start("all", backing=tier)
    caller = Caller(rig.node.address)
    one, value = name(), os.urandom(MIB)
    caller.put([one], [value])
    until(lambda: one in tier.values, "it is stored")
    push_out(caller)
    assert caller.ask(Exists(op=1, names=one)).tiers == bytes([3])
    assert caller.ask(Prefetch(op=1, names=one + name())).outcomes == bytes([OK, MISSING])
    until(lambda: caller.ask(Exists(op=1, names=one)).tiers == bytes([1]), "it is loaded")
    assert caller.get([one]) == [value]
    caller.close()
