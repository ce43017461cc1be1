"""Values that a node brings in from other nodes' memory."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.store.values.entries import ScopeState
from anabranch.store.values.live.node_custody import Custody
from anabranch.store.values.live.node_lanes import NodeLanes
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import Parts
from anabranch.store.values.slices import slice_sums

IMPORT_S = 30.0


class _ArenaSink:
    """An extent of the arena, taken when the size is known; without room the bytes go nowhere."""

    def __init__(self, custody: Custody, state: ScopeState, name: bytes) -> None:
        self._custody = custody
        self.state = state
        self.name = name
        self.era = state.era
        self.start: int | None = None
        self.size = 0

    @property
    def room(self) -> int | None:
        return None

    def open(self, size: int) -> Parts:
        shelf = self._custody.shelf
        with self._custody.lock:
            if self.start is not None and size != self.size:
                self.give_back()
            self.size = size
            more = self.start is None
            while more:
                self.start = shelf.reserve(self.state.tenant, size)
                more = self.start is None and shelf.unfinished
        if self.start is None:
            return Parts([memoryview(bytearray(size))])
        return Parts([self._custody.memory.data[self.start : self.start + size]])

    def give_back(self) -> None:
        """Under the lock."""
        if self.start is not None:
            self._custody.shelf.unreserve(self.state.tenant, self.start, self.size)
            self.start = None


class Imports:
    """A value that is removed while it is on its way does not come back."""

    def __init__(self, custody: Custody, lanes: NodeLanes) -> None:
        self._custody = custody
        self._lanes = lanes
        self._under_way: dict[bytes, _ArenaSink] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    def begin(
        self, state: ScopeState, address: str, names: list[bytes], changed: Callable[[], None]
    ) -> Callable[[], None]:
        """The job that brings them. A name that is on its way already is not brought twice."""
        with self._custody.lock:
            fresh = [name for name in names if name not in self._under_way]
            sinks = [_ArenaSink(self._custody, state, name) for name in fresh]
            self._under_way.update(zip(fresh, sinks, strict=True))
        return lambda: self._run(state, address, sinks, changed)

    def forget(self, names: list[bytes]) -> None:
        with self._custody.lock:
            for name in names:
                self._under_way.pop(name, None)

    def cancel(self, names: list[bytes]) -> None:
        with self._custody.lock:
            for name in names if self._under_way else ():
                if name in self._under_way:
                    self._under_way[name].era = -1

    def _run(self, state: ScopeState, address: str, sinks: list[_ArenaSink], changed: Callable[[], None]) -> None:
        outcomes = [Outcome.UNREACHABLE] * len(sinks)
        try:
            if state.scope is not None and sinks:
                names = b"".join([sink.name for sink in sinks])
                got = self._lanes.fetch(address, state.scope, names, sinks, IMPORT_S)
                outcomes = [one.outcome for one in got]
        finally:
            for sink, outcome in zip(sinks, outcomes, strict=True):
                self._end(sink, outcome)
            changed()

    def _end(self, sink: _ArenaSink, outcome: Outcome) -> None:
        custody = self._custody
        sums: tuple[int, ...] = ()
        if outcome is Outcome.OK and sink.start is not None and sink.size:
            sums = tuple(slice_sums(custody.memory.data[sink.start : sink.start + sink.size]))
        with custody.lock:
            self._under_way.pop(sink.name, None)
            fresh = sink.era == sink.state.era and sink.name not in sink.state.entries
            if outcome is Outcome.OK and sink.start is not None and fresh:
                entry = custody.shelf.commit(sink.state, sink.name, sink.size, sums, b"", sink.start)
                custody.shelf.release(entry)
                custody.shelf.counters["imported"] += 1
                custody.shelf.counters["imported_bytes"] += sink.size
            else:
                sink.give_back()
            custody.notice()
