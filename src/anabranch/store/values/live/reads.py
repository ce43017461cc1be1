"""Gets over all that may have the values: the home node, then whoever the directory names, replica after replica.

An item is asked for at the next holder as long as none has delivered it and the deadline has not passed. What is said
of an item in the end: DAMAGED if a replica was, UNREACHABLE if a holder did not answer, UNKNOWN if somebody who might
hold it has not said so yet, else MISSING.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from anabranch.core.errors import AccessDenied, Retryable, WireError
from anabranch.store.shards import Whereabouts
from anabranch.store.values.got import Got
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.fetch import Fetch
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.nodes import Nodes
from anabranch.store.values.live.party import Party
from anabranch.store.values.live.single import get_one
from anabranch.store.values.live.sinks import Sink
from anabranch.store.values.messages import INLINE_BYTES
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES
from anabranch.transfer.live.workers import Workers

PATIENCE_S = 1.25
"""How long a holder may be silent if somebody else may have the value."""
HUNG_PATIENCE_S = 0.25
"""The same for the only node there is, after it has failed."""
MOST_AT_ONCE = 4
"""Nodes that one get reads from at the same time."""
DRAM = 1
FINAL = (Outcome.OK, Outcome.TOO_BIG, Outcome.DENIED)
_WORST_FIRST = (Outcome.DAMAGED, Outcome.UNREACHABLE, Outcome.UNKNOWN, Outcome.STALE, Outcome.MISSING)


class Reads:
    def __init__(
        self, nodes: Nodes, workers: Workers, lanes: int, hot: Callable[[list[bytes], LanePool], None]
    ) -> None:
        self._nodes, self._workers, self._lanes, self._hot = nodes, workers, lanes, hot

    def get(self, names: bytes, sinks: Sequence[Sink], call: Call) -> list[Got]:
        """One for each name."""
        candidates = self._nodes.candidates(call)
        batch = _Batch(names, sinks)
        home = candidates[0]
        alone = self._nodes.directory is None and len(candidates) == 1
        call.patience_s = PATIENCE_S if not alone else HUNG_PATIENCE_S if home.resting else float("inf")
        self._ask(batch, home, range(len(sinks)), call)
        if alone or not (open_items := batch.open_items):
            return batch.results()
        if self._nodes.directory is None:
            self._ask_everybody(batch, candidates[1:], call)
        else:
            self._ask_holders(batch, open_items, home, call)
        return batch.results()

    def _ask_everybody(self, batch: _Batch, pools: Sequence[LanePool], call: Call) -> None:
        for pool in pools:
            if not batch.open_items or call.over:
                return
            self._ask(batch, pool, batch.open_items, call)

    def _ask_holders(self, batch: _Batch, items: list[int], home: LanePool, call: Call) -> None:
        found = self._where(batch, items, call)
        if found is None:
            return
        rows = {item: found.holders(row) for row, item in enumerate(items)}
        tried = {item: {_node_id(home)} for item in items}
        remote: list[bytes] = []
        while not call.over:
            shares: dict[tuple[str, str], list[int]] = {}
            for item in batch.open_items:
                holder = self._next_holder(rows.get(item, []), tried[item])
                if holder is not None and self._nodes.pool(holder[1]).resting:
                    batch.record([item], [Got(Outcome.UNREACHABLE)])  # nobody waits for it again so soon
                elif holder is not None:
                    tried[item].add(holder[0])
                    shares.setdefault(holder, []).append(item)
            if not shares:
                break
            self._ask_all(batch, [(self._nodes.pool(address), share) for (_, address), share in shares.items()], call)
            remote += [batch.name(item) for share in shares.values() for item in share if batch.came(item)]
        if found.unknown:
            batch.doubt()
        if remote:
            self._hot(remote, home)

    def _where(self, batch: _Batch, items: list[int], call: Call) -> Whereabouts | None:
        directory = self._nodes.directory
        if directory is None:
            return None
        try:
            return directory.where(batch.names_of(items), timeout_s=max(0.05, min(PATIENCE_S, call.left_s)))
        except (Retryable, WireError):
            batch.doubt()
            return None

    def _next_holder(self, holders: Sequence[tuple[str, str, int]], tried: set[str]) -> tuple[str, str] | None:
        """(node_id, address): nodes that rest after a failure last, the nearest tier first."""
        left = [holder for holder in holders if holder[0] not in tried]
        if not left:
            return None
        node_id, address, _ = min(left, key=lambda h: (self._nodes.pool(h[1]).suspect, not h[2] & DRAM, h[1]))
        return node_id, address

    def _ask_all(self, batch: _Batch, shares: list[tuple[LanePool, list[int]]], call: Call) -> None:
        """Several nodes at once; who gets no thread is asked by the caller's own."""
        waiting = deque(shares)

        def work() -> None:
            while True:
                try:
                    pool, share = waiting.popleft()
                except IndexError:
                    return
                try:
                    self._ask(batch, pool, share, call)
                except AccessDenied:
                    # One node with other secrets must not keep a client from all the others.
                    pool.failed()
                    batch.record(share, [Got(Outcome.UNREACHABLE)] * len(share))

        with Party(self._workers, min(len(shares), MOST_AT_ONCE) - 1, work):
            try:
                work()
            except BaseException:
                call.cancel()
                raise

    def _ask(self, batch: _Batch, pool: LanePool, items: Sequence[int], call: Call) -> None:
        if len(items) == 1:
            i = items[0]
            room = batch.sinks[i].room
            if room is None or room <= INLINE_BYTES:
                got = get_one(pool, self._workers, batch.name(i), batch.sinks[i], call, lanes=self._lanes)
                if got is not None:
                    batch.record(items, [got])
                    return
        sinks = [batch.sinks[i] for i in items]
        fetch = Fetch(pool, self._workers, batch.names_of(items), sinks, call, lanes=self._lanes)
        batch.record(items, fetch.run())


def _node_id(pool: LanePool) -> str:
    return pool.welcome.node_id if pool.welcome else ""


class _Batch:
    """What is known of each item so far."""

    def __init__(self, names: bytes, sinks: Sequence[Sink]) -> None:
        self.names, self.sinks = names, sinks
        self._got: list[Got] = [Got(Outcome.MISSING)] * len(sinks)

    def record(self, items: Sequence[int], results: Sequence[Got]) -> None:
        for i, got in zip(items, results, strict=True):
            if got.outcome in FINAL or _rank(got.outcome) < _rank(self._got[i].outcome):
                self._got[i] = got

    @property
    def open_items(self) -> list[int]:
        return [i for i, got in enumerate(self._got) if got.outcome not in FINAL]

    def came(self, i: int) -> bool:
        return self._got[i].outcome is Outcome.OK

    def doubt(self) -> None:
        """That nobody was found proves nothing."""
        self._got = [Got(Outcome.UNKNOWN) if got.outcome is Outcome.MISSING else got for got in self._got]

    def name(self, i: int) -> bytes:
        return self.names[i * NAME_BYTES : (i + 1) * NAME_BYTES]

    def names_of(self, items: Sequence[int]) -> bytes:
        return self.names if len(items) == len(self.sinks) else b"".join(map(self.name, items))

    def results(self) -> list[Got]:
        return self._got


def _rank(outcome: Outcome) -> int:
    return _WORST_FIRST.index(outcome) if outcome in _WORST_FIRST else -1


class HotReads:
    """Counts a client's reads from other nodes than its home: a value read `limit` times within WINDOW_S is worth a
    copy at home. Thread-safe."""

    WINDOW_S = 60.0
    REMEMBERED = 4096

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._counts: dict[bytes, tuple[int, float]] = {}

    def seen(self, names: Sequence[bytes]) -> list[bytes]:
        """Those that have just become worth it."""
        now = time.monotonic()
        hot = []
        with self._lock:
            for name in names if self._limit else ():
                count, since = self._counts.pop(name, (0, now))
                if now - since > self.WINDOW_S:
                    count, since = 0, now
                self._counts[name] = (count + 1, since)
                if count + 1 == self._limit:
                    hot.append(name)
            while len(self._counts) > self.REMEMBERED:
                del self._counts[next(iter(self._counts))]
        return hot
