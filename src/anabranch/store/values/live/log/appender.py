"""Puts values into segments: chooses the place, writes data, then the frame that describes it, and makes room.

One thread at a time (`ValueLog` sees to it). **See also** `store.values.log` for which segment goes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from anabranch.core.errors import Overloaded
from anabranch.core.faults import Faults
from anabranch.store.values.contracts import Record
from anabranch.store.values.live.log.direct import MAX_IO_BYTES, aligned_buffer
from anabranch.store.values.live.log.files import LogFiles
from anabranch.store.values.live.log.reader import GAP_BYTES, PIECES, READ_BYTES, SegmentReader
from anabranch.store.values.live.log.sync import GroupSync
from anabranch.store.values.live.log.writer import SegmentWriter, wants_page
from anabranch.store.values.log import Item, LogIndex, Segment, own_segment_bytes, plan_reads, survivors
from anabranch.store.values.log_format import Entry, pack_frame
from anabranch.store.values.outcome import Outcome
from anabranch.transfer.live.tally import Tally

OWN_SHARE = 2
"""A value above this part (1/n) of a segment that does not fit any more gets a segment of its own."""
WAIT_FOR_READERS_S = 1.0


class Job(msgspec.Struct, eq=False, gc=False):
    """A value on its way to the disk. `cancelled`: removed or invalidated meanwhile."""

    record: Record
    data: memoryview
    outcome: Outcome = Outcome.FULL
    cancelled: bool = False


class _Active:
    """A segment that takes values."""

    def __init__(self, segment: Segment, files: LogFiles, faults: Faults, last_page: bytes = b"") -> None:
        self.segment = segment
        self.writer = SegmentWriter(faults, segment.cursor, last_page)
        self.index_fd = files.index_descriptor(segment.number)
        self.placed: list[tuple[Job, int]] = []
        self.placed_bytes = 0


class Appender:
    """`state`: guards `index` and the jobs' flags; notified when a segment has lost its last reader. `room`: bytes that
    segments may have in all."""

    def __init__(
        self,
        index: LogIndex,
        files: LogFiles,
        sync: GroupSync,
        state: threading.Condition,
        *,
        usual_bytes: int,
        room: Callable[[], int],
        pending: dict[bytes, Job],
        evicted: list[bytes],
        tally: Tally,
        faults: Faults,
    ) -> None:
        self._index = index
        self._files = files
        self._sync = sync
        self._state = state
        self._usual = usual_bytes
        self._room = room
        self._pending = pending
        self._evicted = evicted
        self._tally = tally
        self._faults = faults
        self._reader = SegmentReader(faults)
        self._active: _Active | None = None

    @property
    def active(self) -> int | None:
        return None if self._active is None else self._active.segment.number

    def write(self, jobs: Iterable[Job]) -> None:
        """Set each job's outcome. Raises OSError or Overloaded, then those not written have FULL."""
        try:
            for job in jobs:
                self._put(job)
        except Overloaded:
            self._flush_active()
            raise
        except OSError:
            self.retire()  # a segment that failed takes nothing more
            raise
        self._flush_active()

    def discard_one(self) -> None:
        """Evict a segment and give its space back to the file system. Raises Overloaded if there is none."""
        with self._evict_one() as (victim, kept):
            self._files.delete(victim.number)
            self._lose(kept)

    def resume(self, segment: Segment) -> None:
        """Go on with a segment that was found on disk. Raises OSError."""
        with self._files.use(segment.number) as fd:
            last = aligned_buffer(4096)
            kept = segment.cursor % 4096
            if kept:
                os.preadv(fd, [last], segment.cursor - kept)
        self._active = _Active(segment, self._files, self._faults, bytes(last) if kept else b"")

    def retire(self) -> None:
        """The active segment takes no more values."""
        if self._active is not None:
            active, self._active = self._active, None
            os.close(active.index_fd)

    def _flush_active(self) -> None:
        if self._active is not None:
            try:
                self._flush(self._active)
            except OSError:
                self.retire()
                raise

    # --- placing ------------------------------------------------------------------------------------------------

    def _put(self, job: Job) -> None:
        record, stored = job.record, job.data.nbytes
        direct = wants_page(job.data, stored)
        if self._active is not None:
            at = self._active.segment.place(record, stored, aligned=direct)
            if at is not None:
                self._write_at(self._active, job, at, direct)
                return
            if stored > self._usual // OWN_SHARE:
                self._put_alone(job, direct)
                return
            self._flush(self._active)
            self.retire()
        if own_segment_bytes(record, stored) > self._usual:
            self._put_alone(job, direct)
            return
        self._active = self._open(self._usual)
        self._put(job)

    def _put_alone(self, job: Job, direct: bool) -> None:
        own = self._open(own_segment_bytes(job.record, job.data.nbytes))
        try:
            at = own.segment.place(job.record, job.data.nbytes, aligned=direct)
            if at is None:
                raise OSError(errno.ENOSPC, "a segment of a value's own size is too small for it")
            self._write_at(own, job, at, direct)
            self._flush(own)
        finally:
            os.close(own.index_fd)

    def _write_at(self, active: _Active, job: Job, at: int, direct: bool) -> None:
        with self._files.use(active.segment.number) as fd:
            active.writer.add(fd, at, job.data, direct=direct)
        active.placed.append((job, at))
        active.placed_bytes += job.data.nbytes
        if active.placed_bytes >= MAX_IO_BYTES:
            self._flush(active)

    def _flush(self, active: _Active) -> None:
        """Data, then frame, then the index: nobody finds what is not there, and a kill in between loses only this."""
        placed, active.placed, active.placed_bytes = active.placed, [], 0
        if not placed:
            return
        segment = active.segment
        with self._files.use(segment.number) as fd:
            active.writer.flush(fd)
        with self._state:
            placed = [(job, at) for job, at in placed if not self._cancelled(job)]
            first = self._index.next_sequence
            self._index.next_sequence += len(placed)
        if not placed:
            segment.framed(b"")
            return
        entries = [Entry.of(job.record, at, job.data.nbytes) for job, at in placed]
        frame = pack_frame(segment.number, first, entries, segment.checksum)
        at = segment.framed(frame)
        if os.pwrite(active.index_fd, frame, at) != len(frame):
            raise OSError(errno.EIO, "only a part of an index frame was written")
        self._sync.wrote(segment.number)
        with self._state:
            for sequence, (job, offset) in enumerate(placed, first):
                item = Item(job.record, segment.number, offset, job.data.nbytes, sequence)
                if self._cancelled(job):
                    self._index.bury(item)  # its removal has a bound that covers this sequence
                else:
                    self._index.add(item)
                    job.outcome = Outcome.OK
        self._tally.add("log_written_values", len(placed))
        self._tally.add("log_written_bytes", sum(job.data.nbytes for job, _ in placed))

    def _cancelled(self, job: Job) -> bool:
        if job.cancelled:
            job.outcome = Outcome.STALE
        return job.cancelled

    # --- making room --------------------------------------------------------------------------------------------

    def _open(self, size_bytes: int) -> _Active:
        """A new segment. Raises Overloaded if no room can be made, or the file system stays full after one eviction."""
        room = self._room()
        if size_bytes > room:
            raise Overloaded("other files leave the SSD tier no room")
        forced = False
        while True:
            with self._state:
                free = room - self._index.segment_bytes
            if free >= size_bytes:
                try:
                    return self._create(size_bytes)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    if forced:
                        raise Overloaded("the file system of the SSD tier is full") from error
                forced = True
                self._tally.add("log_forced_evictions")
            with self._evict_one(forced=forced) as (victim, kept):
                if victim.size_bytes == size_bytes and (forced or free >= 0):
                    return self._recycle(victim, kept)
                self._files.delete(victim.number)
                self._lose(kept)

    def _create(self, size_bytes: int) -> _Active:
        with self._state:
            number = self._index.next_segment
        self._files.create(number, size_bytes)
        self._sync.named()
        return self._activate(size_bytes)

    def _activate(self, size_bytes: int) -> _Active:
        with self._state:
            segment = self._index.open_segment(size_bytes)
        return _Active(segment, self._files, self._faults)

    def _recycle(self, victim: Segment, kept: list[Job]) -> _Active:
        self._files.recycle(victim.number, self._index.next_segment)
        self._sync.named()
        active = self._activate(victim.size_bytes)
        try:
            for job in kept:
                at = active.segment.place(job.record, job.data.nbytes, aligned=False)
                if at is not None:
                    self._write_at(active, job, at, direct=False)
            self._flush(active)
        except OSError:
            os.close(active.index_fd)
            raise
        finally:
            self._lose([job for job in kept if job.outcome is not Outcome.OK])
            self._unpend(kept)
        self._tally.add("log_kept_values", len(kept))
        return active

    @contextlib.contextmanager
    def _evict_one(self, *, forced: bool = False) -> Iterator[tuple[Segment, list[Job]]]:
        """Take the least useful segment out of the index; those of its values that are to be written again stay
        pending."""
        if self._active is not None and self._index.segments.keys() == {self._active.segment.number}:
            self._flush_active()  # there is only this one, and what comes needs a segment of its own
            self.retire()
        with self._state:
            spare = () if self._active is None else (self._active.segment.number,)
            self._state.wait_for(lambda: self._index.victim(spare) or not self._read_now(), timeout=WAIT_FOR_READERS_S)
            victim = self._index.victim(spare)
            if victim is None:
                what = "the file system is full" if forced else "its files leave no room"
                raise Overloaded(
                    "every segment of the SSD tier is being read" if self._read_now() else f"SSD tier: {what}"
                )
            alive = self._index.evict(victim)
            keep = survivors(victim, alive)
            kept = [Job(item.record, aligned_buffer(item.stored)[: item.stored]) for item in keep]
            for job in kept:
                self._pending[job.record.name] = job
            names = {job.record.name for job in kept}
            self._evicted.extend(item.record.name for item in alive if item.record.name not in names)
        self._sync.gone(victim.number)
        self._tally.add("log_evicted_segments")
        self._tally.add("log_evicted_values", len(alive) - len(kept))
        self._read_back(victim, keep, kept)
        yield victim, kept

    def _read_back(self, victim: Segment, keep: list[Item], kept: list[Job]) -> None:
        try:
            with self._files.use(victim.number) as fd:
                places = list(enumerate(keep))
                for run in plan_reads(places, gap_bytes=GAP_BYTES, run_bytes=READ_BYTES, pieces=PIECES):
                    self._reader.read_run(fd, [(piece.offset, kept[piece.wish].data) for piece in run.pieces])
        except OSError:
            self._lose(kept)
            kept.clear()

    def _read_now(self) -> bool:
        return any(segment.readers for segment in self._index.segments.values())

    def _lose(self, jobs: Sequence[Job]) -> None:
        """They were to be kept and could not."""
        with self._state:
            self._evicted.extend(job.record.name for job in jobs if not job.cancelled)
        self._unpend(jobs)

    def _unpend(self, jobs: Sequence[Job]) -> None:
        with self._state:
            for job in jobs:
                if self._pending.get(job.record.name) is job:
                    del self._pending[job.record.name]
