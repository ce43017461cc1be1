"""The disciplined way from DRAM to a slower tier: a queue bounded in bytes and age, and one thread."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from anabranch.core.errors import AnabranchError
from anabranch.store.values.contracts import Record
from anabranch.store.values.entries import Entry
from anabranch.store.values.live.node_custody import Custody
from anabranch.store.values.outcome import Outcome

BATCH_BYTES = 16 << 20
BATCH_ITEMS = 1024
Sink = Callable[[Sequence[tuple[Record, memoryview]]], list[Outcome]]


class Appends:
    """Values that are being written to a tier right now. Whoever removes one waits for its write to end, or it would
    come back. All calls under the lock."""

    def __init__(self, custody: Custody) -> None:
        self._custody = custody
        self._ended = threading.Condition(custody.lock)
        self._entries: Counter[Entry] = Counter()

    def begin(self, entries: Sequence[Entry]) -> None:
        self._entries.update(entries)

    def end(self, entries: Sequence[Entry]) -> None:
        self._entries.subtract(entries)
        for entry in entries:
            if self._entries[entry] <= 0:
                del self._entries[entry]
        self._ended.notify_all()

    def wait(self, concerned: Callable[[Entry], bool], timeout_s: float) -> bool:
        """False: some write does not end."""
        deadline = self._custody.now() + timeout_s
        while any(map(concerned, self._entries)):
            left = deadline - self._custody.now()
            if left <= 0:
                return False
            self._ended.wait(left)
        return True


class _Waiting:
    """`data`: a copy of a value that has left DRAM; else the entry still has it. `era`: of its scope."""

    __slots__ = ("data", "entry", "era", "since")

    def __init__(self, entry: Entry, since: float, data: bytes | None) -> None:
        self.entry = entry
        self.era = entry.scope.era
        self.since = since
        self.data = data


class TierWriter:
    """`written(entry)` is called under the lock for each value that is in the tier now. What is dropped is counted by
    reason: queue_full, age, gone (evicted or removed before its turn), refused (by the tier), failed."""

    def __init__(
        self,
        tier: str,
        custody: Custody,
        appends: Appends,
        sink: Sink,
        *,
        queue_bytes: int,
        queue_age_s: float,
        written: Callable[[Entry], None],
    ) -> None:
        self._tier = tier
        self._custody = custody
        self._appends = appends
        self._copies: dict[bytes, _Waiting] = {}
        self._sink = sink
        self._queue_bytes = queue_bytes
        self._queue_age_s = queue_age_s
        self._written = written
        self._queue: deque[_Waiting] = deque()
        self._wake = threading.Condition(custody.lock)
        self._closing = False
        self.waiting_bytes = 0
        self.problem = ""
        self._thread = threading.Thread(target=self._run, name=f"{tier}-write", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, entry: Entry, *, leaving: bool = False) -> None:
        """Under the lock. `leaving`: the value is on its way out of DRAM; its bytes are copied."""
        if entry.queued or self._closing:
            return
        if self._queue and self.waiting_bytes + entry.size > self._queue_bytes:
            self._drop("queue_full")
            return
        data = None
        if leaving:
            data = bytes(self._custody.memory.data[entry.offset : entry.offset + entry.size])
        entry.queued = True
        self.waiting_bytes += entry.size
        waiting = _Waiting(entry, self._custody.now(), data)
        self._queue.append(waiting)
        if data is not None:
            self._copies[entry.name] = waiting
        self._wake.notify()

    def cancel(self, names: Sequence[bytes]) -> None:
        """Under the lock: copies of these are not wanted any more."""
        for name in names if self._copies else ():
            waiting = self._copies.pop(name, None)
            if waiting is not None:
                waiting.era = -1

    def close(self, timeout_s: float = 2.0) -> bool:
        """What waits is written first, as far as there is time."""
        with self._custody.lock:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._custody.lock:
                while not self._queue and not self._closing:
                    self._wake.wait()
                if not self._queue:
                    return
                batch = self._take()
            if batch:
                self._write(batch)

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        oldest = self._custody.now() - self._queue_age_s
        # What is being written cannot be evicted: never more than a part of the arena.
        most = min(BATCH_BYTES, self._custody.memory.size // 8)
        while self._queue and (size < most or not batch) and len(batch) < BATCH_ITEMS:
            waiting = self._queue.popleft()
            entry = waiting.entry
            entry.queued = False
            self.waiting_bytes -= entry.size
            if self._copies.get(entry.name) is waiting:
                del self._copies[entry.name]
            if waiting.since < oldest:
                self._drop("age")
            elif waiting.era != entry.scope.era or (waiting.data is None and not entry.live):
                self._drop("gone")
            else:
                if waiting.data is None:
                    self._custody.shelf.hold(entry)
                batch.append(waiting)
                size += entry.size
        self._appends.begin([waiting.entry for waiting in batch])
        return batch

    def _write(self, batch: list[_Waiting]) -> None:
        memory = self._custody.memory.data
        values = []
        for waiting in batch:
            entry = waiting.entry
            data = (
                memory[entry.offset : entry.offset + entry.size] if waiting.data is None else memoryview(waiting.data)
            )
            values.append((record_of(entry), data))
        try:
            outcomes = self._sink(values)
            self.problem = ""
        except (AnabranchError, OSError) as error:
            self.problem = str(error)
            outcomes = [Outcome.UNREACHABLE] * len(batch)
        with self._custody.lock:
            self._appends.end([waiting.entry for waiting in batch])
            for waiting, outcome in zip(batch, outcomes, strict=True):
                if outcome.stored:
                    self._custody.shelf.counters[f"{self._tier}_written"] += 1
                    self._custody.shelf.counters[f"{self._tier}_written_bytes"] += waiting.entry.size
                    self._written(waiting.entry)
                else:
                    self._drop("failed" if outcome is Outcome.UNREACHABLE else "refused")
                if waiting.data is None:
                    self._custody.shelf.release(waiting.entry)
            self._custody.notice()

    def _drop(self, reason: str) -> None:
        self._custody.shelf.counters[f"{self._tier}_dropped_{reason}"] += 1


def record_of(entry: Entry) -> Record:
    return Record(entry.name, entry.scope.digest, entry.size, entry.sums, entry.parent)
