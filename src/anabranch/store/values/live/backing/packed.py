"""`contracts.BackingTier` over any place that keeps objects."""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from anabranch.core.errors import IntegrityError, StaleLease, Unavailable
from anabranch.core.faults import Faults
from anabranch.store.values.contracts import Cipher, Record
from anabranch.store.values.live.backing.catalog import Catalog
from anabranch.store.values.live.backing.objects import Objects
from anabranch.store.values.live.backing.rewriting import compact, is_due
from anabranch.store.values.live.backing.upkeep import Upkeep
from anabranch.store.values.log_format import Entry, require_sound
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.packs import PACK_BYTES, pack_object
from anabranch.store.values.scope import NAME_BYTES
from anabranch.store.values.slices import slice_sums
from anabranch.transfer.live.tally import Tally

log = logging.getLogger(__name__)


class _Job(msgspec.Struct, eq=False, gc=False):
    """A value on its way out. `cancelled`: removed or invalidated meanwhile."""

    record: Record
    data: memoryview
    outcome: Outcome = Outcome.UNREACHABLE
    cancelled: bool = False


class PackedBacking:
    """See `contracts.BackingTier`; thread-safe. In addition:

    `store` writes one pack for each 64 MiB of a call: call it with many values. It answers DIFFERS for other bytes
    under a known name, FULL if there is no room, STALE if the scope was invalidated (or the tenant's key forgotten)
    meanwhile, UNREACHABLE if the place cannot be reached; what is OK is there for good. `load` answers UNREACHABLE,
    STALE, TOO_BIG likewise; a value whose pack was rewritten is looked up once more. `remove` and `invalidate` first
    learn what others wrote; a value that another node is writing at this very moment is that node's to drop (it gets
    the same call). `refresh`, `remove`, `invalidate` and `compact` raise Unavailable if the place cannot be reached.

    With `refresh_s` a thread of its own calls `refresh` that often, and `compact` now and then.
    """

    def __init__(
        self, objects: Objects, *, cipher: Cipher | None, faults: Faults, refresh_s: float | None = None
    ) -> None:
        self._objects = objects
        self._cipher = cipher
        self._faults = faults
        self._tally = Tally()
        self._catalog = Catalog(objects, self._tally)
        self._lock, self._index = self._catalog.lock, self._catalog.index
        self._storing = threading.Lock()
        self._pending: dict[bytes, _Job] = {}
        self._closed = False
        self.refresh()
        self._upkeep = None if refresh_s is None else Upkeep(self._keep_up, self.compact, refresh_s)

    # --- looking ------------------------------------------------------------------------------------------------

    def record(self, name: bytes) -> Record | None:
        with self._lock:
            return self._index.record(name)

    def present(self, names: bytes) -> bytes:
        with self._lock:
            return self._index.present(names, NAME_BYTES)

    def names(self) -> Iterable[bytes]:
        with self._lock:
            return list(self._index)

    @property
    def counters(self) -> Counter[str]:
        return self._tally.snapshot()

    # --- storing ------------------------------------------------------------------------------------------------

    def store(self, batch: Sequence[tuple[Record, memoryview]]) -> list[Outcome]:
        self._check_open()
        for record, data in batch:
            require_sound(record, data.nbytes)
        with self._storing:
            outcomes, jobs = self._admit(batch)
            try:
                self._store(list(dict.fromkeys(jobs.values())))
            finally:
                with self._lock:
                    self._pending.clear()
        answered: set[_Job] = set()
        for index, job in jobs.items():
            outcome = Outcome.STALE if job.cancelled else job.outcome
            outcomes[index] = Outcome.PRESENT if job in answered and outcome is Outcome.OK else outcome
            answered.add(job)
        return outcomes

    def _admit(self, batch: Sequence[tuple[Record, memoryview]]) -> tuple[list[Outcome], dict[int, _Job]]:
        """The outcomes that are plain at once, and jobs for the others (equal values share one)."""
        outcomes = [Outcome.PRESENT] * len(batch)
        jobs: dict[int, _Job] = {}
        with self._lock:
            for index, (record, data) in enumerate(batch):
                job = self._pending.get(record.name)
                there = self._index.record(record.name) or (None if job is None else job.record)
                if there is not None and (there.size, there.sums) != (record.size, record.sums):
                    outcomes[index] = Outcome.DIFFERS
                elif job is not None:
                    jobs[index] = job
                elif there is None:
                    plain = data if data.ndim == 1 and data.format == "B" else data.cast("B")
                    jobs[index] = self._pending[record.name] = _Job(record, plain)
        return outcomes, jobs

    def _store(self, jobs: list[_Job]) -> None:
        group: list[_Job] = []
        size = 0
        for job in jobs:
            if not self._seal(job):
                continue
            if group and size + job.data.nbytes > PACK_BYTES:
                self._store_pack(group)
                group, size = [], 0
            group.append(job)
            size += job.data.nbytes
        if group:
            self._store_pack(group)

    def _seal(self, job: _Job) -> bool:
        if self._cipher is None:
            return True
        try:
            if self._cipher.overhead(job.record.scope, job.record.size):
                job.data = memoryview(self._cipher.seal(job.record, job.data))
        except StaleLease:
            job.cancelled = True
        return not job.cancelled

    def _store_pack(self, jobs: list[_Job]) -> None:
        try:
            if self._faults.at("backing.store"):
                raise OSError(errno.EIO, "input/output error")
            self._catalog.write_pack([(job.record, job.data) for job in jobs], [], lambda: self._publishable(jobs))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            log.warning("storing %d values in the backing tier failed: %s", len(jobs), error)
            self._tally.add("backing_store_errors")
            for job in jobs:
                job.outcome = Outcome.FULL if full else Outcome.UNREACHABLE
            return
        for job in jobs:
            job.outcome = Outcome.OK

    def _publishable(self, jobs: list[_Job]) -> set[bytes]:
        return {job.record.name for job in jobs if not job.cancelled}

    # --- loading ------------------------------------------------------------------------------------------------

    def load(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[Outcome]:
        self._check_open()
        outcomes = [Outcome.MISSING] * len(names)
        left = self._load(range(len(names)), names, into, outcomes)
        if left:  # their packs are gone: rewritten by another node, or removed
            try:
                self.refresh()
            except Unavailable:
                return outcomes
            for index in self._load(left, names, into, outcomes):
                outcomes[index] = Outcome.MISSING
        return outcomes

    def _load(
        self, wanted: Iterable[int], names: Sequence[bytes], into: Sequence[memoryview], outcomes: list[Outcome]
    ) -> list[int]:
        """Set outcomes; returns those whose packs were not there."""
        packs: dict[int, list[tuple[int, Entry, memoryview]]] = {}
        with self._lock:
            for index in wanted:
                found = self._index.find(names[index])
                if found is None:
                    outcomes[index] = Outcome.MISSING
                    continue
                number, entry = found
                view = into[index]
                if entry.size != view.nbytes:
                    outcomes[index] = Outcome.TOO_BIG if entry.size > view.nbytes else Outcome.STALE
                    continue
                plain = view if view.ndim == 1 and view.format == "B" else view.cast("B")
                packs.setdefault(number, []).append((index, entry, plain))
        lost: list[int] = []
        for number, wishes in packs.items():
            wishes.sort(key=lambda wish: wish[1].offset)
            try:
                self._load_pack(number, wishes, outcomes)
            except FileNotFoundError:
                with self._lock:
                    self._index.forget_pack(number)
                lost += [index for index, _, _ in wishes]
            except OSError as error:
                log.warning("reading from the backing tier failed: %s", error)
                self._tally.add("backing_load_errors")
                for index, _, _ in wishes:
                    outcomes[index] = Outcome.UNREACHABLE
        return lost

    def _load_pack(self, number: int, wishes: list[tuple[int, Entry, memoryview]], outcomes: list[Outcome]) -> None:
        effect = self._faults.at("backing.load")
        if effect == "fail":
            raise OSError(errno.EIO, "input/output error")
        sealed = {index: memoryview(bytearray(e.stored)) for index, e, _ in wishes if e.stored != e.size}
        pieces = [(entry.offset, sealed.get(index, view)) for index, entry, view in wishes]
        self._objects.read(pack_object(number), pieces[: len(pieces) // 2] if effect == "short" else pieces)
        self._tally.add("backing_loads")
        self._tally.add("backing_loaded_bytes", sum(view.nbytes for _, view in pieces))
        if effect == "flip" and pieces[0][1].nbytes:
            pieces[0][1][pieces[0][1].nbytes // 2] ^= 1
        for index, entry, view in wishes:
            outcomes[index] = self._checked(entry, view, sealed.get(index))
            if outcomes[index] is Outcome.DAMAGED:
                self._tally.add("backing_damaged")
                with self._lock:
                    self._index.forget(entry.name)

    def _checked(self, entry: Entry, view: memoryview, sealed: memoryview | None) -> Outcome:
        if sealed is not None:
            if self._cipher is None:
                return Outcome.STALE
            try:
                view[:] = self._cipher.open(entry.record, sealed)
            except StaleLease:
                return Outcome.STALE
            except IntegrityError:
                return Outcome.DAMAGED
        return Outcome.OK if tuple(slice_sums(view)) == entry.sums else Outcome.DAMAGED

    # --- removing -----------------------------------------------------------------------------------------------

    def remove(self, names: Sequence[bytes]) -> list[Outcome]:
        self._check_open()
        self.refresh()
        with self._lock:
            outcomes = [Outcome.MISSING] * len(names)
            for index, name in enumerate(names):
                job = self._pending.get(name)
                if job is not None and not job.cancelled:
                    job.cancelled = True
                    outcomes[index] = Outcome.OK
                if self._index.find(name) is not None:
                    outcomes[index] = Outcome.OK
            gone = self._index.removal_of(names)
            self._index.apply(gone)
        self._catalog.write_removal(gone)
        return outcomes

    def invalidate(self, scopes: Sequence[bytes]) -> int:
        self._check_open()
        self.refresh()
        with self._lock:
            waiting = [job for job in self._pending.values() if job.record.scope in set(scopes) and not job.cancelled]
            fresh = sum(self._index.find(job.record.name) is None for job in waiting)
            for job in waiting:
                job.cancelled = True
            gone = self._index.removal_of_scopes(scopes)
            count = self._index.apply(gone)
        self._catalog.write_removal(gone)
        return count + fresh

    # --- upkeep -------------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        self._check_open()
        return self._catalog.refresh()

    def _keep_up(self) -> None:
        self.refresh()
        if is_due(self._catalog):
            self.compact()

    def compact(self) -> int:
        """Rewrite packs that are mostly dead and join small ones; returns how many objects went. Any node may do it at
        any time."""
        self._check_open()
        return compact(self._catalog)

    def close(self) -> None:
        self._closed = True
        if self._upkeep is not None:
            self._upkeep.close()
        self._objects.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the backing tier is closed")
