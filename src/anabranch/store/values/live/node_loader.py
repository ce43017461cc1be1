"""From a slower tier into DRAM: loads of one name are shared, nobody waits for ever, nothing lands too late."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry, ScopeState
from anabranch.store.values.live.node_custody import Custody
from anabranch.store.values.live.node_gets import Loaded
from anabranch.store.values.live.node_pool import Work, WorkPool
from anabranch.store.values.outcome import Outcome

LOAD_S = 5.0
"""How long a get waits for a slower tier."""
ROOM_S = 2.0
"""How long it waits for room in DRAM, if everything is in use; then the outcome is FULL."""
JOB_BYTES = 8 << 20
Read = Callable[[Sequence[bytes], Sequence[memoryview]], list[Outcome]]
Locate = Callable[[ScopeState, bytes], "tuple[int, Record] | None"]


class _Loading:
    """One value on its way. `start`: its extent, nobody else's until the read has ended, however late. `waiters`: how
    many references the entry gets."""

    __slots__ = ("entry", "era", "name", "outcome", "record", "scope", "start", "tier", "waiters", "work")

    def __init__(self, scope: ScopeState, name: bytes, record: Record, tier: int, start: int) -> None:
        self.scope = scope
        self.era = scope.era
        self.name = name
        self.record = record
        self.tier = tier
        self.start = start
        self.waiters = 1
        self.outcome: Outcome | None = None
        self.entry: Entry | None = None
        self.work: Work | None = None


_NO_ROOM: Loaded = (Outcome.FULL, 0, None)


class Loader:
    """`locate`: (index of the tier, record) of a value that is not in DRAM, from memory. `reads`: tier → read into
    buffers. `loaded(entry, tier)` is called under the lock."""

    def __init__(
        self,
        custody: Custody,
        pool: WorkPool,
        locate: Locate,
        reads: dict[int, Read],
        loaded: Callable[[Entry, int], None],
    ) -> None:
        self._custody = custody
        self._pool = pool
        self._locate = locate
        self._reads = reads
        self._loaded = loaded
        self._loading: dict[bytes, _Loading] = {}

    def __len__(self) -> int:
        return len(self._loading)

    def load(self, wanted: Sequence[tuple[ScopeState, bytes]], timeout_s: float = LOAD_S) -> list[Loaded]:
        """What is in DRAM already is held too."""
        custody = self._custody
        deadline = custody.now() + timeout_s
        fresh: list[_Loading] = []
        with custody.lock:
            found = [self._begin(scope, name, fresh) for scope, name in wanted]
            if all(one is _NO_ROOM for one in found):
                # Others are in the way, not what this call asks for.
                found = self._begin_when_there_is_room(wanted, fresh, min(deadline, custody.now() + ROOM_S))
        self._start(fresh)
        return [one if isinstance(one, tuple) else self._await(one, deadline) for one in found]

    def _begin_when_there_is_room(
        self, wanted: Sequence[tuple[ScopeState, bytes]], fresh: list[_Loading], deadline: float
    ) -> list[Loaded | _Loading]:
        custody = self._custody
        found: list[Loaded | _Loading] = [_NO_ROOM] * len(wanted)
        custody.waiting += 1
        try:
            while (
                not custody.closing and all(one is _NO_ROOM for one in found) and (left := deadline - custody.now()) > 0
            ):
                custody.freed.wait(left)
                found = [self._begin(scope, name, fresh) for scope, name in wanted]
        finally:
            custody.waiting -= 1
        return found

    def prefetch(self, wanted: Sequence[tuple[ScopeState, bytes]]) -> list[Outcome]:
        """Begin to load; OK: it is here or on its way."""
        fresh: list[_Loading] = []
        outcomes = []
        with self._custody.lock:
            for scope, name in wanted:
                one = self._begin(scope, name, fresh)
                if isinstance(one, _Loading):
                    one.waiters -= 1
                    outcomes.append(Outcome.OK)
                    continue
                if one[2] is not None:
                    self._custody.shelf.release(one[2])
                outcomes.append(one[0])
        self._start(fresh)
        return outcomes

    def cancel(self, names: Sequence[bytes]) -> None:
        """Under the lock: these were removed; what is on its way must not bring them back."""
        for name in names if self._loading else ():
            if name in self._loading:
                self._loading[name].era = -1

    def _begin(self, scope: ScopeState, name: bytes, fresh: list[_Loading]) -> Loaded | _Loading:
        shelf = self._custody.shelf
        entry = scope.entries.get(name)
        if entry is not None:
            shelf.hold(entry)
            return Outcome.OK, 0, entry
        loading = self._loading.get(name)
        if loading is not None and loading.scope is scope:
            loading.waiters += 1
            return loading
        located = self._locate(scope, name)
        if located is None:
            return Outcome.MISSING, 0, None
        tier, record = located
        start = shelf.reserve(scope.tenant, record.size)
        while start is None and shelf.unfinished:
            start = shelf.reserve(scope.tenant, record.size)
        if start is None:
            shelf.counters["load_no_room"] += 1
            return _NO_ROOM
        loading = _Loading(scope, name, record, tier, start)
        self._loading[name] = loading
        fresh.append(loading)
        return loading

    def _start(self, fresh: list[_Loading]) -> None:
        """Values of one tier together: neighbours are read at once; large batches are read by several threads."""
        for tier, read in self._reads.items():
            job: list[_Loading] = []
            size = 0
            for loading in fresh:
                if loading.tier != tier:
                    continue
                job.append(loading)
                size += loading.record.size
                if size >= JOB_BYTES:
                    self._submit(job, read)
                    job, size = [], 0
            if job:
                self._submit(job, read)

    def _submit(self, job: list[_Loading], read: Read) -> None:
        work = self._pool.submit(lambda: self._run(job, read))
        if work is None:
            self._end(job, [Outcome.UNREACHABLE] * len(job))
            return
        for loading in job:
            loading.work = work

    def _run(self, job: list[_Loading], read: Read) -> None:
        data = self._custody.memory.data
        outcomes = [Outcome.UNREACHABLE] * len(job)
        try:
            views = [data[one.start : one.start + one.record.size] for one in job]
            outcomes = read([one.name for one in job], views)
        finally:
            self._end(job, outcomes)

    def _end(self, job: list[_Loading], outcomes: list[Outcome]) -> None:
        custody = self._custody
        shelf = custody.shelf
        with custody.lock:
            for one, outcome in zip(job, outcomes, strict=True):
                del self._loading[one.name]
                if outcome is Outcome.OK and one.era != one.scope.era:
                    outcome = Outcome.STALE
                if outcome is Outcome.OK and one.name in one.scope.entries:
                    # A writer was faster; its value is as good.
                    one.entry = one.scope.entries[one.name]
                    shelf.hold(one.entry)
                    shelf.unreserve(one.scope.tenant, one.start, one.record.size)
                elif outcome is Outcome.OK:
                    record = one.record
                    one.entry = shelf.commit(one.scope, record.name, record.size, record.sums, record.parent, one.start)
                    self._loaded(one.entry, one.tier)
                else:
                    shelf.counters["load_failed"] += 1
                    shelf.unreserve(one.scope.tenant, one.start, one.record.size)
                if one.entry is not None:
                    for _ in range(one.waiters):
                        shelf.hold(one.entry)
                    shelf.release(one.entry)
                one.outcome = outcome
            custody.notice()

    def _await(self, one: _Loading, deadline: float) -> Loaded:
        while one.work is None and one.outcome is None and self._custody.now() < deadline:
            # Another caller has just begun it and is about to hand it to the pool.
            with self._custody.lock:
                self._custody.freed.wait(0.001)
        if one.outcome is None and one.work is not None:
            one.work.wait(deadline - self._custody.now())
        with self._custody.lock:
            if one.outcome is None:
                one.waiters -= 1
                return Outcome.UNREACHABLE, 0, None
            return one.outcome, one.tier, one.entry
