"""How values lie in a segment of the log, and what a removal looks like on disk.

    segment file  v1-<id>.seg     data → · · · free · · · ← index
    removed.log                   removals, one after another

Data grows upwards from the first byte, the index downwards from the last one, so that neither 64-byte values nor those
of many megabytes waste what the other would need. The index is a row of *frames*, each written after its data:

    … [body of frame 2][trailer 2][body of frame 1][trailer 1] end of file

A frame is never changed once written: a page that holds old and new frames has equal old bytes before and after any
torn write. Its checksum covers its segment's id and the checksum of the frame before it: neither frames of the file's
earlier life count, nor those behind a frame that a crash of the machine lost. A kill between data and frame loses
values that nobody was told about. Packs of the backing tier end in one frame of the same form.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from anabranch.core.errors import IntegrityError, InvalidInput
from anabranch.store.values.contracts import Record
from anabranch.store.values.scope import NAME_BYTES, SCOPE_BYTES
from anabranch.store.values.slices import slice_count

PAGE = 4096
VERSION = 1
SEGMENT_NAME = re.compile(r"v(\d+)-([0-9a-f]{16})\.seg")
REMOVED_NAME = "removed.log"
LOCK_NAME = "lock"
_MAGIC = b"ANBRVAL1"
_TRAILER = struct.Struct("<QQIIQ8s")  # segment id, first sequence, entries, body bytes, checksum, magic
TRAILER_BYTES = _TRAILER.size
_REMOVAL = struct.Struct("<4s4s32sQQ")  # magic, kind, name or scope, sequence, checksum
REMOVAL_BYTES = _REMOVAL.size
_REMOVAL_MAGIC = b"ARM1"
_KINDS = {b"name": 32, b"scop": 16}


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value in a segment. `stored` bytes at `offset`; more than `size` where a cipher sealed it."""

    name: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    scope: Annotated[bytes, Meta(min_length=SCOPE_BYTES, max_length=SCOPE_BYTES)]
    size: Annotated[int, Meta(ge=0)]
    sums: tuple[int, ...]
    parent: Annotated[bytes, Meta(max_length=NAME_BYTES)]
    offset: Annotated[int, Meta(ge=0)]
    stored: Annotated[int, Meta(ge=0)]

    @property
    def is_sound(self) -> bool:
        """It can be read without harm, whoever wrote it."""
        return len(self.sums) == slice_count(self.size) and 0 <= self.stored - self.size <= 1024 + self.size // 1024

    @classmethod
    def of(cls, record: Record, offset: int, stored: int) -> Entry:
        return cls(record.name, record.scope, record.size, record.sums, record.parent, offset, stored)

    @property
    def record(self) -> Record:
        return Record(self.name, self.scope, self.size, self.sums, self.parent)


class Removal(msgspec.Struct, frozen=True):
    """Entries of `name` (or `scope`; the other is empty) whose sequence is at most `sequence` are gone."""

    name: bytes
    scope: bytes
    sequence: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def require_sound(record: Record, data_bytes: int) -> None:
    """Raises InvalidInput for a record that does not describe a value of `data_bytes` bytes."""
    if (
        len(record.name) != NAME_BYTES
        or len(record.scope) != SCOPE_BYTES
        or len(record.parent) > NAME_BYTES
        or record.size != data_bytes
        or len(record.sums) != slice_count(data_bytes)
    ):
        raise InvalidInput(
            f"a record of {record.size} bytes with {len(record.sums)} sums for {data_bytes} bytes of data"
        )


def segment_name(segment: int) -> str:
    return f"v{VERSION}-{segment:016x}.seg"


def align_up(position: int) -> int:
    return -(-position // PAGE) * PAGE


def align_down(position: int) -> int:
    return position // PAGE * PAGE


def entry_bound(record: Record) -> int:
    """Most bytes that an entry of this record takes in a frame."""
    return len(record.name) + len(record.scope) + len(record.parent) + 9 * (len(record.sums) + 3) + 16


def pack_frame(segment: int, first_sequence: int, entries: Sequence[Entry], previous: int = 0) -> bytes:
    """The frame of `entries`; entry i has sequence `first_sequence` + i. `previous`: `frame_checksum` of the frame
    before it in this segment, 0 for the first."""
    body = _encoder.encode(entries)
    fields = _TRAILER.pack(segment, first_sequence, len(entries), len(body), previous, _MAGIC)
    return body + _TRAILER.pack(segment, first_sequence, len(entries), len(body), _sum(fields, body), _MAGIC)


def frame_checksum(frame: bytes) -> int:
    return int(_TRAILER.unpack_from(frame, len(frame) - TRAILER_BYTES)[4])


def unpack_frame(data: bytes | memoryview, segment: int) -> tuple[int, list[Entry]]:
    """(first sequence, entries) of the frame that `data` ends with. Raises IntegrityError if there is none, or only a
    part of it, or it belongs to another segment or format version."""
    found = _last_frame(memoryview(data), len(data), segment, 0)
    if not isinstance(found, tuple):
        raise IntegrityError("no whole index frame at the end")
    return found[0], found[1]


class FrameScan:
    """Reads a segment's index from the end of its file. Feed it the file's last bytes; while `wants` is not 0, feed it
    at least that many. `frames`: (first sequence, entries), oldest first; `index_bytes`: what they take; `checksum`: of
    the last one."""

    def __init__(self, segment: int) -> None:
        self._segment = segment
        self.frames: list[tuple[int, list[Entry]]] = []
        self.index_bytes = 0
        self.checksum = 0
        self.wants = TRAILER_BYTES

    def feed(self, tail: bytes | memoryview) -> None:
        view = memoryview(tail)
        self.wants = 0
        while True:
            found = _last_frame(view, len(view) - self.index_bytes, self._segment, self.checksum)
            if isinstance(found, int):
                self.wants = found and found + self.index_bytes
                return
            self.frames.append(found[:2])
            self.index_bytes += found[2]
            self.checksum = found[3]


def _last_frame(view: memoryview, end: int, segment: int, previous: int) -> tuple[int, list[Entry], int, int] | int:
    """(first sequence, entries, bytes, checksum) of the frame before `end`; else how many bytes before `end` must be
    there to tell, 0 if there is none."""
    if end < TRAILER_BYTES:
        return TRAILER_BYTES
    at = end - TRAILER_BYTES
    owner, first, count, length, checksum, magic = _TRAILER.unpack_from(view, at)
    if magic != _MAGIC or owner != segment:
        return 0
    if length > at:
        return int(length) + TRAILER_BYTES
    body = view[at - length : at]
    if checksum != _sum(_TRAILER.pack(owner, first, count, length, previous, magic), body):
        return 0
    try:
        entries = _decoder.decode(body)
    except msgspec.MsgspecError:
        return 0  # a sound checksum over fields of another version
    if len(entries) != count or not all(entry.is_sound for entry in entries):
        return 0
    return first, entries, length + TRAILER_BYTES, checksum


def _sum(fields: bytes, body: bytes | memoryview) -> int:
    state = xxhash.xxh3_64(fields)
    state.update(body)
    return int(state.intdigest())


def pack_removal(removal: Removal) -> bytes:
    kind, what = (b"name", removal.name) if removal.name else (b"scop", removal.scope)
    fields = _REMOVAL.pack(_REMOVAL_MAGIC, kind, what, removal.sequence, 0)
    return _REMOVAL.pack(_REMOVAL_MAGIC, kind, what, removal.sequence, int(xxhash.xxh3_64_intdigest(fields)))


def unpack_removals(data: bytes) -> Iterator[Removal]:
    """All up to the first that is torn: what follows it was never acknowledged."""
    for at in range(0, len(data) - REMOVAL_BYTES + 1, REMOVAL_BYTES):
        magic, kind, what, sequence, checksum = _REMOVAL.unpack_from(data, at)
        fields = _REMOVAL.pack(magic, kind, what, sequence, 0)
        if magic != _REMOVAL_MAGIC or kind not in _KINDS or checksum != xxhash.xxh3_64_intdigest(fields):
            return
        what = what[: _KINDS[kind]]
        yield Removal(what, b"", sequence) if kind == b"name" else Removal(b"", what, sequence)
