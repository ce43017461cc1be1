"""`contracts.BackingTier` over any place that keeps objects."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from anabranch.core.errors import IntegrityError, StaleLease, Unavailable
from anabranch.core.faults import Faults
from anabranch.store.values.contracts import Cipher, Record
from anabranch.store.values.live.backing.objects import Objects
from anabranch.store.values.log_format import Entry
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.packs import (
    GONE,
    INDEX,
    PACK_BYTES,
    PACKS,
    Gone,
    Pack,
    PackIndex,
    decode_gone,
    decode_head,
    encode_gone,
    encode_head,
    gone_object,
    index_object,
    object_number,
    pack_object,
)
from anabranch.store.values.scope import NAME_BYTES
from anabranch.store.values.slices import slice_sums
from anabranch.transfer.live.tally import Tally

log = logging.getLogger(__name__)
LEARNERS = 8
"""Index objects that a refresh fetches at once."""
KEEP_REMOVALS_S = 86_400.0
"""A removal object is kept this long even if its packs are gone: someone may be rewriting one of them right now."""


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
    """

    def __init__(self, objects: Objects, *, cipher: Cipher | None, faults: Faults) -> None:
        self._objects = objects
        self._cipher = cipher
        self._faults = faults
        self._tally = Tally()
        self._lock = threading.Lock()
        self._refreshing = threading.Lock()
        self._index = PackIndex()
        self._applied: set[int] = set()
        self._ignored: set[int] = set()  # index objects that are damaged or of another version
        self._unlisted: set[int] = set()  # packs that this process is writing
        self._pending: dict[bytes, _Job] = {}
        self._closed = False
        self.refresh()

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
        outcomes = [Outcome.PRESENT] * len(batch)
        jobs: dict[int, _Job] = {}
        with self._lock:
            for index, (record, data) in enumerate(batch):
                job = self._pending.get(record.name)
                there = self._index.record(record.name) or (None if job is None else job.record)
                if there is None:
                    plain = data if data.ndim == 1 and data.format == "B" else data.cast("B")
                    jobs[index] = self._pending[record.name] = _Job(record, plain)
                elif (there.size, there.sums) != (record.size, record.sums):
                    outcomes[index] = Outcome.DIFFERS
        try:
            self._store(list(jobs.values()))
        finally:
            with self._lock:
                for job in jobs.values():
                    del self._pending[job.record.name]
        for index, job in jobs.items():
            outcomes[index] = Outcome.STALE if job.cancelled else job.outcome
        return outcomes

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
            self._write_pack([(job.record, job.data) for job in jobs], [], lambda: self._publishable(jobs))
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

    def _write_pack(
        self, values: Sequence[tuple[Record, memoryview]], replaces: list[int], still: Callable[[], set[bytes]]
    ) -> None:
        """Data first; it counts once its index object is there. `still`, asked in between: which names may be seen.
        Raises OSError."""
        number = int.from_bytes(os.urandom(8), "big")
        entries: list[Entry] = []
        offset = 0
        for record, data in values:
            entries.append(Entry.of(record, offset, data.nbytes))
            offset += data.nbytes
        frame, _ = encode_head(number, entries, replaces)
        self._objects.put(pack_object(number), [*(data for _, data in values), memoryview(frame)])
        with self._lock:
            names = still()
            pack = Pack(number, {e.name: e for e in entries if e.name in names}, replaces, offset)
            # Known here before others can see it, so that a removal from now on names it.
            self._index.add(pack)
            self._unlisted.add(number)
            alive = list(pack.entries.values())
        self._publish(pack, alive)
        self._tally.add("backing_packs_written")
        self._tally.add("backing_written_bytes", offset)

    def _publish(self, pack: Pack, alive: list[Entry]) -> None:
        number, published = pack.number, False
        try:
            if alive:
                head = encode_head(number, alive, pack.replaces)[1]
                self._objects.put(index_object(number), [memoryview(head)])
                published = True
            else:
                self._objects.delete([pack_object(number)])
        finally:
            with self._lock:
                self._unlisted.discard(number)
                if not published:
                    self._index.forget_pack(number)

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
        self._write_removal(gone)
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
        self._write_removal(gone)
        return count + fresh

    def _write_removal(self, gone: Gone) -> None:
        if not gone.names and not gone.scopes:
            return
        number = int.from_bytes(os.urandom(8), "big")
        with self._lock:
            self._applied.add(number)
        try:
            self._objects.put(gone_object(number), [memoryview(encode_gone(gone))])
        except OSError as error:
            raise Unavailable(f"the backing tier could not confirm a removal: {error}") from error

    # --- learning -----------------------------------------------------------------------------------------------

    def refresh(self) -> int:
        self._check_open()
        with self._refreshing:
            try:
                return self._refresh()
            except OSError as error:
                raise Unavailable(f"the backing tier cannot be reached: {error}") from error

    def _refresh(self) -> int:
        with self._lock:
            before, applied = set(self._index.packs) - self._unlisted, set(self._applied)
            known = before | self._unlisted | self._ignored
        # Removals before packs: whoever rewrites a pack writes the new one before the old one's removals are dropped.
        gone = {object_number(item.name): item.name for item in self._objects.list(GONE)}
        there = {object_number(item.name): item.name for item in self._objects.list(INDEX)}
        removals = self._fetch({number: name for number, name in gone.items() if number not in applied})
        heads = self._fetch({number: name for number, name in there.items() if number not in known})
        with self._lock:
            for number, content in removals:
                self._learn_removal(number, content)
            for number in before - there.keys():
                self._index.forget_pack(number)
            return sum(self._learn_pack(number, content) for number, content in heads)

    def _learn_removal(self, number: int, content: bytes) -> None:
        self._applied.add(number)
        try:
            self._index.apply(decode_gone(content))
        except IntegrityError as error:
            log.warning("%s: %s", gone_object(number), error)
            self._tally.add("backing_ignored_objects")

    def _learn_pack(self, number: int, content: bytes) -> bool:
        if number in self._index.packs:
            return False
        try:
            self._index.add(decode_head(number, content))
        except IntegrityError as error:
            log.warning("%s", error)
            self._tally.add("backing_ignored_objects")
            self._ignored.add(number)
            return False
        return True

    def _fetch(self, objects: dict[int | None, str]) -> list[tuple[int, bytes]]:
        """Contents of those that are still there."""
        wanted = [(number, name) for number, name in objects.items() if number is not None]
        if len(wanted) < 3:
            found = [self._get(name) for _, name in wanted]
        else:
            with ThreadPoolExecutor(min(LEARNERS, len(wanted)), thread_name_prefix="backing-learn") as pool:
                found = list(pool.map(self._get, [name for _, name in wanted]))
        return [(number, data) for (number, _), data in zip(wanted, found, strict=True) if data is not None]

    def _get(self, name: str) -> bytes | None:
        try:
            return self._objects.get(name)
        except FileNotFoundError:
            return None

    # --- housekeeping -------------------------------------------------------------------------------------------

    def compact(self) -> int:
        """Rewrite packs that are mostly dead and join small ones; returns how many objects went. Any node may do it at
        any time; two at once cost space until the next time."""
        self._check_open()
        self.refresh()
        with self._lock:
            able = [pack for pack in self._index.worth_rewriting() if pack.number not in self._unlisted]
            old = {pack.number: list(pack.entries.values()) for pack in able}
        try:
            return self._compact(old) + self._drop_old_removals() + self._drop_orphans()
        except OSError as error:
            raise Unavailable(f"the backing tier cannot be reached: {error}") from error

    def _compact(self, old: dict[int, list[Entry]]) -> int:
        batch: list[tuple[Record, memoryview]] = []
        sources: list[int] = []
        done, size = 0, 0
        for number, entries in old.items():
            values = self._copy_of(number, entries)
            if values is None:
                continue
            if size and size + sum(data.nbytes for _, data in values) > PACK_BYTES:
                done += self._replace(sources, batch)
                batch, sources, size = [], [], 0
            batch += values
            sources.append(number)
            size += sum(data.nbytes for _, data in values)
        return done + self._replace(sources, batch)

    def _copy_of(self, number: int, entries: list[Entry]) -> list[tuple[Record, memoryview]] | None:
        values = [(entry.record, memoryview(bytearray(entry.stored))) for entry in entries]
        pieces = sorted(((e.offset, data) for e, (_, data) in zip(entries, values, strict=True)), key=lambda p: p[0])
        try:
            self._objects.read(pack_object(number), pieces)
        except FileNotFoundError:
            return None
        return values

    def _replace(self, sources: list[int], values: list[tuple[Record, memoryview]]) -> int:
        if not sources:
            return 0

        def still() -> set[bytes]:
            return {name for number in sources for name in getattr(self._index.packs.get(number), "entries", ())}

        if values:
            self.refresh()  # removals that others wrote while we read
            with self._lock:
                before = [n for number in sources for n in getattr(self._index.packs.get(number), "replaces", ())]
            self._write_pack(values, [*sources, *before], still)
        with self._lock:
            for number in sources:
                self._index.forget_pack(number)
        self._objects.delete([index_object(number) for number in sources])
        self._objects.delete([pack_object(number) for number in sources])
        self._tally.add("backing_packs_rewritten", len(sources))
        return 2 * len(sources)

    def _drop_old_removals(self) -> int:
        with self._lock:
            known = set(self._index.packs)
        old = []
        for item in self._objects.list(GONE):
            if item.age_s > KEEP_REMOVALS_S:
                content = self._get(item.name)
                try:
                    gone = decode_gone(content) if content is not None else Gone()
                except IntegrityError:
                    continue
                if not known & (gone.names.keys() | gone.scopes.keys()):
                    old.append(item.name)
        self._objects.delete(old)
        return len(old)

    def _drop_orphans(self) -> int:
        """Packs whose writer was killed before it could publish them."""
        packs = self._objects.list(PACKS)
        listed = {object_number(item.name) for item in self._objects.list(INDEX)}
        old = [p.name for p in packs if p.age_s > KEEP_REMOVALS_S and object_number(p.name) not in listed]
        self._objects.delete(old)
        return len(old)

    def close(self) -> None:
        self._closed = True
        self._objects.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the backing tier is closed")
