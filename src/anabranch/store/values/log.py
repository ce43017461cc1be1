"""The value log's decisions: what is where, where the next value goes, which segment goes first, which reads are one.

**Covers** integers and records. **Does not cover** bytes, files and locks (`store.values.live.log`), nor how a segment
looks (`store.values.log_format`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from anabranch.core.errors import InvariantBroken
from anabranch.store.values.contracts import Record
from anabranch.store.values.log_format import (
    TRAILER_BYTES,
    Entry,
    Removal,
    align_down,
    align_up,
    entry_bound,
    frame_checksum,
)

MIN_SEGMENT_BYTES = 64 << 10
SEGMENTS = 16
"""At least this many segments share a small capacity: one eviction takes one segment."""
KEEP_SHARE = 4
"""At most this part (1/n) of an evicted segment is written again."""
KEEP_USES = 2
"""… and only values read this often: one read alone has warmed its segment, which is enough."""


class Item(msgspec.Struct, gc=False, eq=False):
    """A value in the log. `uses`: reads since it was written here."""

    record: Record
    segment: int
    offset: int
    stored: int
    sequence: int
    uses: int = 0


class Segment:
    """`cursor` … `size_bytes - index_bytes` is free. `checksum`: of its last frame. `heat`: bytes read from it and
    written to it, halved for every `half_life` bytes that the log takes."""

    def __init__(
        self, number: int, size_bytes: int, *, cursor: int = 0, index_bytes: int = 0, checksum: int = 0
    ) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.cursor = cursor
        self.index_bytes = index_bytes
        self.checksum = checksum
        self.items: list[Item] = []
        self.live_bytes = 0
        self.heat = 0.0
        self.tick = 0
        self.readers = 0
        self._promised = 0

    def place(self, record: Record, stored: int, *, aligned: bool) -> int | None:
        """Offset for `stored` bytes, which it then owns, and room for an index entry; None if it does not fit."""
        at = align_up(self.cursor) if aligned else self.cursor
        promised = self._promised + entry_bound(record)
        # Data and index never share a page: one is written around the page cache, the other through it.
        if align_up(at + stored) > align_down(self.size_bytes - self.index_bytes - promised - TRAILER_BYTES):
            return None
        self._promised = promised
        self.cursor = at + stored
        return at

    def framed(self, frame: bytes) -> int:
        """Everything placed so far is described by this frame (b"": nothing of it is to be found); returns where it
        goes."""
        self._promised = 0
        if frame:
            self.index_bytes += len(frame)
            self.checksum = frame_checksum(frame)
        return self.size_bytes - self.index_bytes


def segment_bytes_for(capacity_bytes: int, segment_bytes: int) -> int:
    """The usual size of a segment; 0 if the capacity is too small for a log."""
    fair = align_down(min(segment_bytes, capacity_bytes // SEGMENTS))
    return fair if fair >= MIN_SEGMENT_BYTES else 0


def own_segment_bytes(record: Record, stored: int) -> int:
    """Size of a segment that holds just this value."""
    return align_up(stored) + align_up(entry_bound(record) + TRAILER_BYTES)


class LogIndex:
    """Which value is in which segment. A value's latest entry counts; older ones of its name are dead space.

    Eviction takes the segment with the least heat per byte. A segment starts with the heat of its live bytes: without
    reads the oldest goes first, removed values make it go earlier, each read later (in effect the segment-wise clock of
    log-structured caches, e.g. "Kangaroo", McAllister et al. 2021, §4, with a decay instead of a bit).
    """

    def __init__(self, half_life_bytes: int) -> None:
        self._half_life = max(half_life_bytes, 1)
        self._items: dict[bytes, Item] = {}
        self._clock = 0
        self.segments: dict[int, Segment] = {}
        self.next_segment = 1
        self.next_sequence = 1

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items.values())

    def get(self, name: bytes) -> Item | None:
        return self._items.get(name)

    def present(self, names: bytes, width: int) -> bytes:
        items = self._items
        return bytes([names[at : at + width] in items for at in range(0, len(names), width)])

    @property
    def live_bytes(self) -> int:
        return sum(segment.live_bytes for segment in self.segments.values())

    @property
    def segment_bytes(self) -> int:
        """Bytes of all segment files."""
        return sum(segment.size_bytes for segment in self.segments.values())

    # --- segments -----------------------------------------------------------------------------------------------

    def open_segment(self, size_bytes: int) -> Segment:
        segment = Segment(self.next_segment, size_bytes)
        self.next_segment += 1
        segment.tick = self._clock
        self.segments[segment.number] = segment
        return segment

    def adopt(self, segment: Segment, frames: Iterable[tuple[int, list[Entry]]], removals: Removals) -> None:
        """A segment found on disk. Call in order of segment numbers."""
        self.segments[segment.number] = segment
        self.next_segment = max(self.next_segment, segment.number + 1)
        segment.tick = self._clock
        for first, entries in frames:
            for sequence, entry in enumerate(entries, first):
                item = Item(entry.record, segment.number, entry.offset, entry.stored, sequence)
                other = self._items.get(entry.name)
                if entry.offset + entry.stored > segment.size_bytes:
                    continue  # no program of ours wrote it
                if removals.covers(item) or (other is not None and other.sequence > sequence):
                    self.bury(item)
                else:
                    self.add(item)
            self.next_sequence = max(self.next_sequence, first + len(entries))

    def victim(self, spare: Iterable[int] = ()) -> Segment | None:
        """The least useful segment that nobody reads and that is not to be spared."""
        spared = set(spare)
        able = [s for s in self.segments.values() if not s.readers and s.number not in spared]
        return min(able, key=lambda s: (self._heat(s) / s.size_bytes, s.number), default=None)

    def evict(self, segment: Segment) -> list[Item]:
        """Forget a segment and all it holds; what was alive in it."""
        del self.segments[segment.number]
        alive = [item for item in segment.items if self._items.get(item.record.name) is item]
        for item in alive:
            del self._items[item.record.name]
        return alive

    # --- values -------------------------------------------------------------------------------------------------

    def add(self, item: Item) -> None:
        """Now this is where the value is."""
        segment = self.segments[item.segment]
        old = self._items.get(item.record.name)
        if old is not None:
            self.drop(old)
        self._items[item.record.name] = item
        segment.items.append(item)
        segment.live_bytes += item.stored
        self._warm(segment, item.stored)
        self._clock += item.stored

    def bury(self, item: Item) -> None:
        """It lies in its segment and is not to be found."""
        self.segments[item.segment].items.append(item)

    def use(self, item: Item) -> None:
        item.uses += 1
        self._warm(self.segments[item.segment], item.stored)

    def drop(self, item: Item) -> None:
        """Forget a value; its bytes stay until their segment goes."""
        if self._items.get(item.record.name) is not item:
            raise InvariantBroken("a value that is not in the log cannot leave it")
        del self._items[item.record.name]
        segment = self.segments[item.segment]
        left = segment.live_bytes - item.stored
        segment.heat *= left / segment.live_bytes if segment.live_bytes else 1.0
        segment.live_bytes = left

    def dead_names(self) -> dict[bytes, bytes]:
        """Name → scope of what still lies in some segment but must not come back."""
        dead: dict[bytes, bytes] = {}
        for segment in self.segments.values():
            for item in segment.items:
                if self._items.get(item.record.name) is not item:
                    dead[item.record.name] = item.record.scope
        return dead

    def _warm(self, segment: Segment, count: int) -> None:
        segment.heat = self._heat(segment) + count
        segment.tick = self._clock

    def _heat(self, segment: Segment) -> float:
        return float(segment.heat * 0.5 ** min((self._clock - segment.tick) / self._half_life, 1000.0))


def survivors(segment: Segment, alive: Sequence[Item]) -> list[Item]:
    """Those of an evicted segment that earn another life: read KEEP_USES times since they were written, most read and
    latest first, at most 1/KEEP_SHARE of the segment."""
    left = segment.size_bytes // KEEP_SHARE
    kept = []
    for item in sorted((i for i in alive if i.uses >= KEEP_USES), key=lambda i: (-i.uses, -i.sequence)):
        if item.stored <= left:
            left -= item.stored
            kept.append(item)
    return sorted(kept, key=lambda i: i.offset)


class Removals:
    """What must not come back from the disk: a bound for each removed name and scope."""

    def __init__(self, removals: Iterable[Removal] = ()) -> None:
        self.names: dict[bytes, int] = {}
        self.scopes: dict[bytes, int] = {}
        for removal in removals:
            self.add(removal)

    def add(self, removal: Removal) -> None:
        table, key = (self.names, removal.name) if removal.name else (self.scopes, removal.scope)
        table[key] = max(table.get(key, 0), removal.sequence)

    def covers(self, item: Item) -> bool:
        bound = max(self.names.get(item.record.name, 0), self.scopes.get(item.record.scope, 0))
        return item.sequence <= bound

    @property
    def last(self) -> int:
        return max(max(self.names.values(), default=0), max(self.scopes.values(), default=0))

    def still_needed(self, dead: dict[bytes, bytes]) -> list[Removal]:
        """Those that concern entries that are still on disk."""
        scopes = set(dead.values())
        return [Removal(name, b"", bound) for name, bound in self.names.items() if name in dead] + [
            Removal(b"", scope, bound) for scope, bound in self.scopes.items() if scope in scopes
        ]


class Piece(msgspec.Struct, frozen=True):
    """Bytes `start` … `start + length` of wish number `wish`, which lie at `offset` of a segment."""

    wish: int
    offset: int
    length: int
    start: int = 0


class Run(msgspec.Struct, frozen=True):
    """One read: pieces in order of offsets, none overlapping."""

    segment: int
    pieces: list[Piece]


def plan_reads(
    items: Sequence[tuple[int, Item]], *, gap_bytes: int, run_bytes: int, pieces: int, part_bytes: int = 0
) -> list[Run]:
    """Join neighbours: at most `gap_bytes` between two, `run_bytes` and `pieces` in all (one larger value is a run of
    its own). Plain values are cut into parts of `part_bytes`, if given. `items`: (wish, item)."""
    runs: list[Run] = []
    for wish, item in sorted(items, key=lambda pair: (pair[1].segment, pair[1].offset)):
        for piece in _parts(wish, item, part_bytes):
            if runs and runs[-1].segment == item.segment and len(runs[-1].pieces) < pieces:
                first, last = runs[-1].pieces[0], runs[-1].pieces[-1]
                gap = piece.offset - last.offset - last.length
                if 0 <= gap <= gap_bytes and piece.offset + piece.length - first.offset <= run_bytes:
                    runs[-1].pieces.append(piece)
                    continue
            runs.append(Run(item.segment, [piece]))
    return runs


def _parts(wish: int, item: Item, part_bytes: int) -> list[Piece]:
    if not part_bytes or item.stored <= part_bytes or item.stored != item.record.size:
        return [Piece(wish, item.offset, item.stored)]
    return [
        Piece(wish, item.offset + at, min(part_bytes, item.stored - at), at) for at in range(0, item.stored, part_bytes)
    ]
