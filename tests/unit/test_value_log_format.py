"""Segments of the value log: what a kill or another program may have left in them, and which one goes first."""

from __future__ import annotations

import random

import msgspec
import pytest

from anabranch.core.errors import IntegrityError
from anabranch.store.values.contracts import Record
from anabranch.store.values.log import (
    KEEP_SHARE,
    Item,
    LogIndex,
    Removals,
    Segment,
    own_segment_bytes,
    plan_reads,
    segment_bytes_for,
    survivors,
)
from anabranch.store.values.log_format import (
    PAGE,
    TRAILER_BYTES,
    Entry,
    FrameScan,
    Removal,
    align_down,
    align_up,
    entry_bound,
    frame_checksum,
    pack_frame,
    pack_removal,
    segment_name,
    unpack_frame,
    unpack_removals,
)

RANDOM = random.Random(5)
SIZE = 1 << 20


def record(size: int = 100, *, parent: bytes = b"", scope: bytes = b"s" * 16) -> Record:
    sums = tuple(RANDOM.getrandbits(64) for _ in range(-(-size // (512 << 10))))
    return Record(RANDOM.randbytes(32), scope, size, sums, parent)


def entries(count: int) -> list[Entry]:
    return [Entry.of(record(3 << 20, parent=b"p" * 32), n * 4096, 3 << 20) for n in range(count)]


def scanned(data: bytes, segment: int, *, first: int = 64) -> FrameScan:
    scan, reach = FrameScan(segment), first
    while scan.wants:
        reach = min(max(reach * 2, scan.wants), len(data))
        scan.feed(data[len(data) - reach :])
        if reach == len(data):
            break
    return scan


def test_frames_are_found_from_the_end_of_the_file_in_the_order_of_writing() -> None:
    groups = [entries(3), entries(1), entries(40)]
    data, previous = b"", 0
    for n, group in enumerate(groups):
        frame = pack_frame(7, n * 100, group, previous)
        data, previous = frame + data, frame_checksum(frame)
    scan = scanned(b"\0" * 5000 + data, 7)
    assert scan.frames == [(0, groups[0]), (100, groups[1]), (200, groups[2])]
    assert scan.index_bytes == len(data)
    assert scan.checksum == previous
    assert scan.frames[0][1][0].record == groups[0][0].record


def test_a_torn_frame_ends_the_index_and_the_frames_before_it_count() -> None:
    whole = pack_frame(7, 1, entries(2))
    torn = bytearray(pack_frame(7, 3, entries(2), frame_checksum(whole)))
    assert [first for first, _ in scanned(bytes(torn) + whole, 7).frames] == [1, 3]
    for at in range(0, len(torn), 7):
        damaged = bytearray(torn)
        damaged[at] ^= 0x10
        assert [first for first, _ in scanned(bytes(damaged) + whole, 7).frames] == [1]
    for cut in range(1, len(torn), 11):
        assert [first for first, _ in scanned(bytes(cut) + bytes(torn[cut:]) + whole, 7).frames] == [1]


def test_frames_behind_a_lost_one_do_not_count_whatever_takes_its_place() -> None:
    first, lost, other = entries(1), entries(1), entries(1)
    a = pack_frame(7, 1, first)
    b = pack_frame(7, 2, lost, frame_checksum(a))
    c = pack_frame(7, 3, entries(1), frame_checksum(b))
    instead = pack_frame(7, 2, other, frame_checksum(a))
    assert [n for n, _ in scanned(c + b + a, 7).frames] == [1, 2, 3]
    assert [n for n, _ in scanned(c + bytes(len(b)) + a, 7).frames] == [1]
    assert scanned(c + instead + a, 7).frames == [(1, first), (2, other)]


def test_frames_of_the_files_earlier_life_do_not_count() -> None:
    old, new = pack_frame(6, 1, entries(2)), pack_frame(7, 9, entries(1))
    assert [first for first, _ in scanned(old + new, 7).frames] == [9]
    assert scanned(old, 7).frames == []
    assert scanned(bytes(4096), 7).frames == []
    assert scanned(b"", 7).frames == []


def test_an_entry_that_no_value_can_have_ends_the_index_though_its_checksum_is_right() -> None:
    good = entries(1)[0]
    for bad in (
        msgspec.structs.replace(good, sums=()),
        msgspec.structs.replace(good, name=b"short"),
        msgspec.structs.replace(good, scope=b"s" * 17),
        msgspec.structs.replace(good, offset=-1),
        msgspec.structs.replace(good, stored=good.size - 1),
        msgspec.structs.replace(good, stored=good.size * 2),
    ):
        assert scanned(pack_frame(7, 1, [good, bad]), 7).frames == []
    index = LogIndex(1)
    index.adopt(Segment(7, SIZE), [(1, [good])], Removals())
    assert len(index) == 0


def test_a_pack_is_opened_by_its_last_frame_or_not_at_all() -> None:
    group = entries(3)
    frame = pack_frame(11, 0, group)
    assert unpack_frame(b"data" + frame, 11) == (0, group)
    for bad in (frame[:-1], frame[5:], b"", b"x" * 100):
        with pytest.raises(IntegrityError):
            unpack_frame(bad, 11)
    with pytest.raises(IntegrityError):
        unpack_frame(frame, 12)


def test_an_entry_is_never_longer_than_promised() -> None:
    for size in (0, 1, 1 << 19, 1 << 30, 1 << 34):
        for parent in (b"", b"p" * 32):
            one = record(size, parent=parent)
            assert len(pack_frame(1, 0, [Entry.of(one, 1 << 40, size + 99)])) <= entry_bound(one) + TRAILER_BYTES


def test_removals_end_at_the_first_torn_one() -> None:
    removals = [Removal(b"n" * 32, b"", 5), Removal(b"", b"s" * 16, 9), Removal(b"m" * 32, b"", 1)]
    data = b"".join(pack_removal(removal) for removal in removals)
    assert list(unpack_removals(data)) == removals
    assert list(unpack_removals(data[:-1])) == removals[:2]
    damaged = bytearray(data)
    damaged[len(data) // 3 + 9] ^= 1
    assert list(unpack_removals(bytes(damaged))) == removals[:1]
    known = Removals(removals)
    assert known.last == 9
    item = Item(record(scope=b"s" * 16), 1, 0, 100, 9)
    assert known.covers(item)
    assert not known.covers(Item(item.record, 1, 0, 100, 10))
    assert known.still_needed({b"m" * 32: b"t" * 16}) == [removals[2]]


def test_data_and_index_share_a_segment_down_to_the_last_page_and_never_a_page() -> None:
    for size in (1, 64, 500, 4096, 5000, 70_000):
        segment = Segment(1, SIZE)
        count = 0
        while (at := segment.place(one := record(size), size, aligned=size % PAGE == 0)) is not None:
            count += 1
            assert at + size == segment.cursor
            segment.framed(pack_frame(1, 0, [Entry.of(one, at, size)]))
            assert align_up(segment.cursor) <= align_down(SIZE - segment.index_bytes)
        assert SIZE - segment.cursor - segment.index_bytes < size + entry_bound(record(size)) + 3 * PAGE
        assert count >= 0.8 * SIZE / (size + 2 * entry_bound(record(size)) + TRAILER_BYTES) - 1


@pytest.mark.parametrize("size", [0, 1, PAGE, 3 << 20, (64 << 20) + 1])
def test_a_segment_of_its_own_holds_its_value(size: int) -> None:
    one = record(size)
    assert Segment(1, own_segment_bytes(one, size)).place(one, size, aligned=True) == 0


def test_a_small_capacity_is_still_many_segments() -> None:
    assert segment_bytes_for(1 << 40, 64 << 20) == 64 << 20
    assert segment_bytes_for(256 << 20, 64 << 20) == 16 << 20
    assert segment_bytes_for((1 << 20) - 1, 64 << 20) == 0
    assert segment_bytes_for((100 << 20) + 5, 64 << 20) % PAGE == 0


def filled(index: LogIndex, segments: int, values: int, size: int = 1000) -> list[list[Item]]:
    rows = []
    for _ in range(segments):
        segment = index.open_segment(SIZE)
        rows.append(
            [Item(record(size), segment.number, n * size, size, index.next_sequence + n) for n in range(values)]
        )
        for item in rows[-1]:
            index.add(item)
        index.next_sequence += values
    return rows


def test_the_oldest_segment_goes_first_unless_it_is_read_or_held() -> None:
    index = LogIndex(half_life_bytes=100_000)
    rows = filled(index, 4, 10)
    victim = index.victim()
    assert victim is not None
    assert victim.number == 1
    for item in rows[0]:
        index.use(item)
        index.use(item)
    victim = index.victim()
    assert victim is not None
    assert victim.number == 2
    index.segments[2].readers = 1
    victim = index.victim(spare=[3])
    assert victim is not None
    assert victim.number == 4


def test_a_segment_of_removed_values_goes_before_older_ones() -> None:
    index = LogIndex(half_life_bytes=100_000)
    rows = filled(index, 4, 10)
    for item in rows[2]:
        index.drop(item)
    victim = index.victim()
    assert victim is not None
    assert victim.number == 3
    assert index.evict(victim) == []
    assert len(index) == 30
    assert index.live_bytes == 30 * 1000


def test_what_was_read_often_survives_its_segment_within_bounds() -> None:
    index = LogIndex(half_life_bytes=1 << 30)
    (row,) = filled(index, 1, 100, size=10_000)
    for n, item in enumerate(row[::2]):
        item.uses = 2 + n % 3
    segment = index.segments[1]
    kept = survivors(segment, index.evict(segment))
    assert 0 < sum(item.stored for item in kept) <= SIZE // KEEP_SHARE
    assert min(item.uses for item in kept) >= 3
    assert [item.offset for item in kept] == sorted(item.offset for item in kept)


def test_recovery_takes_the_latest_of_a_name_and_nothing_that_was_removed() -> None:
    index = LogIndex(1 << 30)
    first, second, gone, alien = record(), record(), record(), record(scope=b"x" * 16)
    removals = Removals([Removal(gone.name, b"", 3), Removal(b"", b"x" * 16, 100)])
    index.adopt(Segment(4, SIZE), [(1, [Entry.of(r, 0, 100) for r in (first, second, gone)])], removals)
    index.adopt(Segment(5, SIZE), [(10, [Entry.of(first, 7, 100)]), (11, [Entry.of(alien, 8, 100)])], removals)
    found = index.get(first.name)
    assert found is not None
    assert (found.segment, found.sequence) == (5, 10)
    assert index.present(first.name + gone.name + second.name + alien.name, 32) == bytes([1, 0, 1, 0])
    assert (index.next_segment, index.next_sequence) == (6, 12)
    assert index.dead_names() == {
        gone.name: gone.scope,
        alien.name: alien.scope,
        first.name: first.scope,
    }


def test_neighbours_are_one_read() -> None:
    size = 32 << 10
    items = [(n, Item(record(size), 1, n * size, size, n)) for n in range(512)]
    RANDOM.shuffle(items)
    runs = plan_reads(items, gap_bytes=64 << 10, run_bytes=4 << 20, pieces=256)
    assert len(runs) == 4
    for run in runs:
        assert [p.offset for p in run.pieces] == list(
            range(run.pieces[0].offset, run.pieces[0].offset + (4 << 20), size)
        )
    far = [(0, items[0][1]), (1, Item(record(size), 1, 100 << 20, size, 0)), (2, Item(record(size), 2, 0, size, 0))]
    assert len(plan_reads(far, gap_bytes=64 << 10, run_bytes=4 << 20, pieces=256)) == 3
    twice = [(0, items[0][1]), (1, items[0][1])]
    assert len(plan_reads(twice, gap_bytes=64 << 10, run_bytes=4 << 20, pieces=256)) == 2


def test_a_large_value_is_read_in_parts_unless_it_is_sealed() -> None:
    plain, sealed = Item(record(9 << 20), 1, 4096, 9 << 20, 0), Item(record(9 << 20), 2, 0, (9 << 20) + 320, 0)
    runs = plan_reads([(0, plain), (1, sealed)], gap_bytes=0, run_bytes=4 << 20, pieces=8, part_bytes=2 << 20)
    assert [[(p.wish, p.start, p.length) for p in run.pieces] for run in runs] == [
        [(0, 0, 2 << 20), (0, 2 << 20, 2 << 20)],
        [(0, 4 << 20, 2 << 20), (0, 6 << 20, 2 << 20)],
        [(0, 8 << 20, 1 << 20)],
        [(1, 0, (9 << 20) + 320)],
    ]
    assert runs[1].pieces[0].offset == 4096 + (4 << 20)


def test_the_format_has_its_version_in_every_name() -> None:
    assert segment_name(255) == "v1-00000000000000ff.seg"
