"""The SSD tier's decisions: format, index, write-back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from anabranch.blocks.layout import KvLayout
from anabranch.paging.pool import SlotPool
from anabranch.store.actions import Seal, Sealed, SsdWritten, WriteSsd
from anabranch.store.slots import Named, SlotBook
from anabranch.store.ssd_format import SEGMENT_BYTES, pack_header, segment_slots, stride_bytes, unpack_header
from anabranch.store.ssd_index import SsdEntry, SsdIndex
from anabranch.store.writeback import WRITING, WriteBack
from anabranch.testing.store import chain

TENANT = b"t" * 8
DIGEST = b"d" * 16
KEYS = chain("p", 8)


def named(at: int, block_sum: int = 5, tenant: bytes = TENANT) -> Named:
    return Named(KEYS[at], KEYS[at - 1] if at else b"", tenant, block_sum)


# --- format -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 3])
def test_a_header_says_what_was_written(at: int) -> None:
    data = pack_header(named(at), DIGEST, 9)
    assert unpack_header(data + bytes(100), DIGEST, 4) == SsdEntry(4, 9, named(at))


def test_any_changed_bit_of_a_header_makes_it_nothing() -> None:
    data = pack_header(named(1), DIGEST, 9)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert unpack_header(bytes(damaged), DIGEST, 0) is None, at
    assert unpack_header(data[:-1], DIGEST, 0) is None
    assert unpack_header(bytes(200), DIGEST, 0) is None
    assert unpack_header(data, b"e" * 16, 0) is None


def test_segments_are_large_files_within_the_limit() -> None:
    layout = KvLayout(layers=30, kv_heads=3, head_dim=64, block_tokens=16)
    stride = stride_bytes(layout)
    assert stride == 4096 + layout.full_block_bytes
    assert SEGMENT_BYTES - stride < segment_slots(layout, 4 << 30) * stride <= SEGMENT_BYTES
    assert segment_slots(layout, stride) == 1
    assert segment_slots(layout, stride - 1) == 0


# --- index ------------------------------------------------------------------------------------------------------


def index(slots: int = 4) -> SsdIndex:
    return SsdIndex(SlotPool(slots), Counter())


def write(ssd: SsdIndex, at: int) -> int:
    slot = ssd.begin_write(KEYS[at])
    assert slot is not None
    ssd.end_write(slot, named(at), written=True)
    return slot


def test_recovery_keeps_the_later_of_two_and_any_order_of_parents() -> None:
    ssd = index()
    ssd.recover([SsdEntry(3, 1, named(1)), SsdEntry(0, 7, named(1, 6)), SsdEntry(2, 3, named(0))])
    assert ssd.run(KEYS, TENANT) == [2, 0]
    assert ssd.blocks[0].block_sum == 6
    assert ssd.pool.free == 2
    assert set(ssd.take_changes().added) == set(KEYS[:2])


def test_a_run_ends_where_the_tenant_does() -> None:
    ssd = index()
    ssd.recover([SsdEntry(0, 1, named(0)), SsdEntry(1, 2, named(1, tenant=b"u" * 8))])
    assert ssd.run(KEYS, TENANT) == [0]


def test_eviction_takes_children_first_and_never_what_is_read() -> None:
    ssd = index(3)
    slots = [write(ssd, at) for at in range(3)]
    ssd.pin([slots[2]])
    assert ssd.begin_write(KEYS[5]) is None  # the reader holds the leaf, and with it its ancestors
    ssd.unpin([slots[2]])
    assert ssd.begin_write(KEYS[5]) == slots[2]
    assert ssd.run(KEYS, TENANT) == slots[:2]
    assert ssd.holds(KEYS[5])
    assert not ssd.holds(KEYS[2])


def test_a_failed_write_leaves_nothing_behind() -> None:
    ssd = index()
    slot = ssd.begin_write(KEYS[0])
    assert slot is not None
    ssd.end_write(slot, named(0), written=False)
    assert not ssd.holds(KEYS[0])
    assert ssd.pool.free == 4


def test_slots_without_space_are_withheld_until_restored() -> None:
    ssd = index(4)
    first, second = write(ssd, 0), write(ssd, 1)
    assert {first, second} == {0, 1}
    refused = ssd.begin_write(KEYS[2])
    assert refused is not None
    assert ssd.evict_for(refused, named(2), real=2) == second  # the child goes
    ssd.end_write(second, named(2), written=True)
    assert len(ssd.withheld) == 2
    ssd.restore()
    assert ssd.pool.free == 2


# --- write-back -------------------------------------------------------------------------------------------------


class Desk:
    """A write-back with a book of committed blocks in slots 0, 1, …"""

    def __init__(self, blocks: int, capacity: int = 100, ssd_slots: int = 8) -> None:
        self.actions: list[Any] = []
        self.counters: Counter[str] = Counter()
        self.book = SlotBook(SlotPool(10), 10, self.counters)
        self.ssd = SsdIndex(SlotPool(ssd_slots), self.counters)
        self.desk = WriteBack(self.book, self.ssd, capacity, self.counters, self.actions.append)
        self.book.open(b"s")
        slots = self.book.reserve(b"s", blocks) or []
        for at, slot in enumerate(slots):
            self.book.commit(b"s", slot, named(at, 0))
            self.desk.committed(slot, KEYS[at])
        self.book.free(b"s", slots)

    def take(self, kind: type) -> list[Any]:
        taken = [action for action in self.actions if isinstance(action, kind)]
        self.actions[:] = [action for action in self.actions if not isinstance(action, kind)]
        return taken

    def seal(self) -> None:
        for seal in self.take(Seal):
            self.desk.sealed(Sealed(seal.slot, seal.key, 5))

    def written(self, outcome: str = "", now: float = 0.0) -> None:
        for order in self.take(WriteSsd):
            self.desk.written(SsdWritten(order.slot, order.ssd_slot, order.block, outcome, 0), now)


def test_only_what_is_being_written_is_pinned() -> None:
    desk = Desk(8)
    desk.seal()
    assert desk.desk.pending == 8
    assert len([slot for slot in range(10) if desk.book.pool.refs(slot)]) == WRITING
    desk.written()
    desk.written()
    assert desk.desk.pending == 0
    assert desk.ssd.run(KEYS, TENANT) == list(range(8))
    assert desk.counters["ssd_written"] == 8


def test_the_queue_is_bounded_and_the_excess_is_counted() -> None:
    desk = Desk(8, capacity=1)
    desk.seal()
    assert desk.counters["writes_dropped"] == 8 - WRITING - 1


def test_a_block_that_was_evicted_before_its_turn_is_dropped() -> None:
    desk = Desk(8)
    desk.seal()
    assert desk.book.reserve(b"s", 5) is not None
    desk.written()
    desk.written()
    assert desk.counters["writes_dropped"] == 3
    assert desk.desk.pending == 0


def test_writes_pause_when_a_retry_fails_and_resume_later() -> None:
    desk = Desk(2)
    desk.seal()
    desk.written("full")
    desk.written("full")
    assert desk.desk.paused
    assert desk.desk.pending == 0
    assert desk.counters["ssd_pauses"] == 1
    desk.desk.tick(4.9)
    assert desk.desk.paused
    desk.desk.tick(5.1)
    assert not desk.desk.paused
    assert desk.ssd.pool.free == 8
