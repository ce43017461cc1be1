"""Rebuilds the index from the segments' index areas; values are not read."""

from __future__ import annotations

import os

from anabranch.store.values.live.log.files import Found, LogFiles
from anabranch.store.values.log import LogIndex, Removals, Segment
from anabranch.store.values.log_format import PAGE, FrameScan

FIRST_READ_BYTES = 64 << 10


def recover(index: LogIndex, files: LogFiles, removals: Removals) -> Found:
    """Take over every segment in the folder. Raises OSError."""
    found = files.scan()
    for number, size_bytes in sorted(found.segments.items()):
        if not size_bytes or size_bytes % PAGE:
            files.delete(number)  # a kill while it was made
            continue
        scan = _scan(files, number, size_bytes)
        ends = [entry.offset + entry.stored for _, entries in scan.frames for entry in entries]
        segment = Segment(
            number, size_bytes, cursor=max(ends, default=0), index_bytes=scan.index_bytes, checksum=scan.checksum
        )
        index.adopt(segment, scan.frames, removals)
    index.next_sequence = max(index.next_sequence, removals.last + 1)
    return found


def shrink(index: LogIndex, files: LogFiles, room_bytes: int) -> int:
    """Delete the least useful segments until the others fit (the limit may be lower than last time, or other files have
    come); how many values went."""
    gone = 0
    while index.segment_bytes > max(room_bytes, 0):
        victim = index.victim()
        if victim is None:
            break
        gone += len(index.evict(victim))
        files.delete(victim.number)
    return gone


def _scan(files: LogFiles, number: int, size_bytes: int) -> FrameScan:
    scan = FrameScan(number)
    fd = files.index_descriptor(number)
    try:
        reach = FIRST_READ_BYTES
        while scan.wants:
            reach = min(max(reach, scan.wants), size_bytes)
            scan.feed(os.pread(fd, reach, size_bytes - reach))
            if reach == size_bytes:
                break
            reach *= 4
    finally:
        os.close(fd)
    return scan
