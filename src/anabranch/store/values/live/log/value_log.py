"""The SSD tier: one folder, few files, aligned direct I/O, and an index in memory that the files can rebuild.

**Covers** `contracts.DiskTier`. **See also** `store.values.log` (decisions), `store.values.log_format` (bytes on disk).

Locks: `_writing` (one append at a time; held during I/O) before `_state` (index and flags; never held during I/O,
except while segments are deleted for want of room).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from anabranch.core.errors import ConfigError, Overloaded, StaleLease, Unavailable
from anabranch.core.faults import NO_FAULTS, Faults
from anabranch.core.units import format_bytes
from anabranch.store.values.contracts import Cipher, Record
from anabranch.store.values.live.log.appender import Appender, Job
from anabranch.store.values.live.log.fetch import Fetch, Wish
from anabranch.store.values.live.log.files import LogFiles
from anabranch.store.values.live.log.pause import Pause
from anabranch.store.values.live.log.recovery import recover, shrink
from anabranch.store.values.live.log.removals import RemovalLog
from anabranch.store.values.live.log.sync import GroupSync
from anabranch.store.values.log import Item, LogIndex, own_segment_bytes, segment_bytes_for
from anabranch.store.values.log_format import Removal, require_sound
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES
from anabranch.transfer.live.tally import Tally

log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ValueLog:
    """See `contracts.DiskTier`. In addition:

    `append` raises InvalidInput for a record that does not fit its bytes. It answers DIFFERS for other bytes under a
    name that is there, TOO_BIG for what can never fit. After a failed write, writes pause: they answer FULL at once and
    are tried again every `retry_s`. `durable` appends that wait at the same time share one flush; if it fails they
    answer FULL, and the segments concerned are dropped.

    `read` answers TOO_BIG for a buffer that is too small, UNREACHABLE if the device reports an error (the value stays),
    STALE for a sealed value whose key is gone. The buffers belong to the call until it returns, however long a device
    takes: the caller gives them to nobody else before.

    `remove` and `invalidate` return once the removal is on disk. Only these two raise OSError, if even evicting the
    segments concerned fails. Raises ConfigError for a folder that another process uses, or too little room.
    """

    def __init__(
        self,
        folder: str,
        capacity_bytes: int,
        *,
        segment_bytes: int = 64 << 20,
        cipher: Cipher | None = None,
        faults: Faults = NO_FAULTS,
        retry_s: float = 1.0,
    ) -> None:
        self._usual = segment_bytes_for(capacity_bytes, segment_bytes)
        if not self._usual:
            raise ConfigError(f"ssd_bytes = {capacity_bytes} is too little for {folder}: give it 1 MiB or more, or 0")
        self._capacity = capacity_bytes
        self._cipher = cipher
        self._pause = Pause(retry_s)
        self._writing = threading.Lock()
        self._state = threading.Condition()
        self._tally = Tally()
        self._pending: dict[bytes, Job] = {}
        self._evicted: list[bytes] = []
        self._closed = False
        self._files = LogFiles(folder, faults)
        try:
            self._index = LogIndex(capacity_bytes // 2)
            self._sync = GroupSync(self._files, faults)
            self._appender = Appender(
                self._index,
                self._files,
                self._sync,
                self._state,
                usual_bytes=self._usual,
                room=self._room,
                pending=self._pending,
                evicted=self._evicted,
                tally=self._tally,
                faults=faults,
            )
            self._fetch = Fetch(self._files, cipher, self._tally, faults)
            self._removals = RemovalLog(self._files.removed_path)
            self._start(folder)
        except OSError as error:
            self._files.close()
            raise ConfigError(f"ssd_dir {folder} cannot be used: {error.strerror}; name another folder") from error
        except ConfigError:
            self._removals.close()
            self._files.close()
            raise

    # --- looking ------------------------------------------------------------------------------------------------

    def record(self, name: bytes) -> Record | None:
        with self._state:
            item = self._index.get(name)
        return None if item is None else item.record

    def present(self, names: bytes) -> bytes:
        with self._state:
            return self._index.present(names, NAME_BYTES)

    def names(self) -> Iterable[bytes]:
        with self._state:
            return [item.record.name for item in self._index]

    def take_evicted(self) -> list[bytes]:
        with self._state:
            taken = [name for name in self._evicted if self._index.get(name) is None]
            self._evicted.clear()
            return taken

    @property
    def state(self) -> str:
        return self._pause.reason

    @property
    def count(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of its files, those of dead values and free space in segments included."""
        with self._state:
            return self._index.segment_bytes

    @property
    def live_bytes(self) -> int:
        """Bytes of the values that can be read."""
        with self._state:
            return self._index.live_bytes

    @property
    def direct(self) -> bool:
        """The file system takes I/O around its page cache."""
        return self._files.direct

    @property
    def counters(self) -> Counter[str]:
        counts = self._tally.snapshot()
        counts["log_syncs"] = self._sync.syncs
        return counts

    # --- writing ------------------------------------------------------------------------------------------------

    def append(self, batch: Sequence[tuple[Record, memoryview]], *, durable: bool) -> list[Outcome]:
        self._check_open()
        for record, data in batch:
            require_sound(record, data.nbytes)
        with self._writing:
            self._shorten_removals()
            outcomes, jobs = self._admit(batch)
            wanted = list(dict.fromkeys(jobs.values()))
            try:
                if wanted:
                    self._write(wanted)
            finally:
                with self._state:
                    for job in wanted:
                        self._pending.pop(job.record.name, None)
        answered: set[Job] = set()
        for index, job in jobs.items():
            outcomes[index] = Outcome.PRESENT if job in answered and job.outcome is Outcome.OK else job.outcome
            answered.add(job)
        return self._durable(batch, outcomes) if durable else outcomes

    def _shorten_removals(self) -> None:
        def dead() -> dict[bytes, bytes]:
            with self._state:
                return self._index.dead_names()

        if self._removals.wants_rewrite:
            with contextlib.suppress(OSError):  # no room for a smaller file: the larger one will do
                self._removals.rewrite(dead)

    def _admit(self, batch: Sequence[tuple[Record, memoryview]]) -> tuple[list[Outcome], dict[int, Job]]:
        """The outcomes that are plain at once, and jobs for the others (equal values share one)."""
        outcomes = [Outcome.FULL] * len(batch)
        jobs: dict[int, Job] = {}
        with self._state:
            for index, (record, data) in enumerate(batch):
                job = self._pending.get(record.name)
                there = self._index.get(record.name) or job
                if there is not None and (there.record.size, there.record.sums) != (record.size, record.sums):
                    outcomes[index] = Outcome.DIFFERS
                elif job is not None:
                    jobs[index] = job
                elif there is not None:
                    outcomes[index] = Outcome.PRESENT
                elif not self._fits(record):
                    outcomes[index] = Outcome.TOO_BIG
                else:
                    plain = data if data.ndim == 1 and data.format == "B" else data.cast("B")
                    jobs[index] = self._pending[record.name] = Job(record, plain)
        return outcomes, jobs

    def _fits(self, record: Record) -> bool:
        extra = 64 + record.size // 4096 if self._cipher is not None else 0
        return own_segment_bytes(record, record.size + extra) <= self._capacity

    def _write(self, jobs: list[Job]) -> None:
        if self._pause.active:
            return
        try:
            try:
                self._appender.write(self._sealed(jobs))
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                self._appender.discard_one()
                self._tally.add("log_forced_evictions")
                self._appender.write(self._sealed([j for j in jobs if j.outcome is Outcome.FULL and not j.cancelled]))
        except (OSError, Overloaded) as error:
            self._fail(str(error))
        else:
            self._pause.end()

    def _sealed(self, jobs: list[Job]) -> Iterator[Job]:
        for job in jobs:
            if self._cipher is not None:
                try:
                    if self._cipher.overhead(job.record.scope, job.record.size):
                        job.data = memoryview(self._cipher.seal(job.record, job.data))
                except StaleLease:
                    job.cancelled, job.outcome = True, Outcome.STALE
                    continue
            yield job

    def _fail(self, reason: str) -> None:
        self._pause.begin(reason)
        self._tally.add("log_write_errors")

    def _durable(self, batch: Sequence[tuple[Record, memoryview]], outcomes: list[Outcome]) -> list[Outcome]:
        with self._state:
            found = {i: self._index.get(batch[i][0].name) for i, outcome in enumerate(outcomes) if outcome.stored}
        segments = {item.segment for item in found.values() if item is not None}
        try:
            self._sync.wait(segments)
        except OSError as error:
            self._fail(f"flushing the SSD tier failed: {error}")
            # A later flush may succeed although pages were lost: nothing in these segments can be vouched for.
            with self._writing:
                self._drop_segments(segments)
            return [Outcome.FULL if outcome.stored else outcome for outcome in outcomes]
        return outcomes

    def _room(self) -> int:
        return self._capacity - self._files.other_bytes()

    # --- reading ------------------------------------------------------------------------------------------------

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self._check_open()
        outcomes = [Outcome.MISSING] * len(names)
        wishes: list[Wish] = []
        with self._state:
            for index, (name, view) in enumerate(zip(names, into, strict=True)):
                item = self._index.get(name)
                if item is None:
                    continue
                if item.record.size != view.nbytes:
                    outcomes[index] = Outcome.TOO_BIG if item.record.size > view.nbytes else Outcome.STALE
                    continue
                segment = self._index.segments[item.segment]
                plain = view if view.ndim == 1 and view.format == "B" else view.cast("B")
                wishes.append(Wish(index, item, segment, plain))
                self._index.use(item)
                segment.readers += 1
        try:
            self._fetch.fetch(wishes, outcomes)
        finally:
            self._release(wishes)
        damaged = [wish.item for wish in wishes if outcomes[wish.index] is Outcome.DAMAGED]
        if damaged:
            self._forget_damaged(damaged)
        return outcomes

    def _release(self, wishes: list[Wish]) -> None:
        with self._state:
            for wish in wishes:
                wish.segment.readers -= 1
            self._state.notify_all()

    def _forget_damaged(self, items: list[Item]) -> None:
        with self._state:
            gone = [item for item in items if self._index.get(item.record.name) is item]
            for item in gone:
                self._index.drop(item)
            self._evicted.extend(item.record.name for item in gone)
        self._tally.add("log_damaged", len(items))
        log.warning(
            "%d values on the SSD, the first of them %s, are damaged and dropped",
            len(items),
            items[0].record.name.hex(),
        )
        # No flush: if this gets lost in a crash, the value is found damaged once more.
        with contextlib.suppress(OSError):
            self._removals.append([Removal(i.record.name, b"", i.sequence) for i in gone], durable=False)

    # --- removing -----------------------------------------------------------------------------------------------

    def remove(self, names: Sequence[bytes]) -> list[Outcome]:
        self._check_open()
        outcomes = [Outcome.MISSING] * len(names)
        removals: list[Removal] = []
        segments: set[int] = set()
        with self._state:
            last = self._index.next_sequence - 1
            for index, name in enumerate(names):
                job, item = self._pending.get(name), self._index.get(name)
                if job is not None and not job.cancelled:
                    job.cancelled = True
                    outcomes[index] = Outcome.OK
                if item is not None:
                    self._index.drop(item)
                    segments.add(item.segment)
                    outcomes[index] = Outcome.OK
                if outcomes[index] is Outcome.OK:
                    removals.append(Removal(name, b"", last))
        self._bury(removals, segments)
        return outcomes

    def invalidate(self, scopes: Sequence[bytes]) -> int:
        self._check_open()
        gone = set(scopes)
        segments: set[int] = set()
        with self._state:
            items = [item for item in self._index if item.record.scope in gone]
            for item in items:
                self._index.drop(item)
                segments.add(item.segment)
            self._evicted += [item.record.name for item in items]
            cancelled = [j for j in self._pending.values() if j.record.scope in gone and not j.cancelled]
            for job in cancelled:
                job.cancelled = True
            last = self._index.next_sequence - 1
        self._bury([Removal(b"", scope, last) for scope in gone], segments)
        return len(items) + len(cancelled)

    def _bury(self, removals: list[Removal], segments: set[int]) -> None:
        """Make removals last. If there is no room even for them, the segments that hold the values go instead."""
        if not removals:
            return
        try:
            self._removals.append(removals)
        except OSError as error:
            log.warning("a removal could not be written (%s): %d segments are deleted instead", error, len(segments))
            with self._writing:
                self._drop_segments(segments)
            self._files.sync_folder()

    def _drop_segments(self, segments: set[int]) -> None:
        with self._state:
            if self._appender.active in segments:
                self._appender.retire()
            for number in segments & set(self._index.segments):
                alive = self._index.evict(self._index.segments[number])
                self._evicted.extend(item.record.name for item in alive)
                self._sync.gone(number)
                self._files.delete(number)

    # --- start and end ------------------------------------------------------------------------------------------

    def _start(self, folder: str) -> None:
        disk = self._files.disk_bytes()
        if disk and self._capacity > disk:
            raise ConfigError(
                f"ssd_bytes = {format_bytes(self._capacity)}, but the whole disk of {folder} has {format_bytes(disk)}:"
                " lower ssd_bytes, or name another folder"
            )
        found = recover(self._index, self._files, self._removals.known)
        self._tally.add("log_recovered_values", len(self._index))
        self._tally.add("log_ignored_segments", found.ignored)
        self._tally.add("log_evicted_values", shrink(self._index, self._files, self._room()))
        if self._room() < self._usual:
            raise ConfigError(
                f"ssd_bytes = {self._capacity} leaves no room in {folder}: other files there have"
                f" {self._capacity - self._room()} bytes; raise ssd_bytes, or name another folder"
            )
        with contextlib.suppress(OSError):  # no room for a smaller file: the larger one will do
            self._removals.rewrite(self._index.dead_names)
        last = max(self._index.segments.values(), key=lambda s: s.number, default=None)
        if last is not None and last.size_bytes == self._usual and last.cursor < last.size_bytes // 2:
            self._appender.resume(last)

    def close(self) -> None:
        with self._writing:
            if self._closed:
                return
            self._closed = True
            self._appender.retire()
            self._fetch.close()
            with self._state:
                self._state.wait_for(lambda: not any(s.readers for s in self._index.segments.values()), timeout=5.0)
            self._removals.close()
            self._files.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the SSD tier is closed")
