"""A batch of gets from one node.

Small values come inline, several in an answer; large ones are leased and read slice by slice. A few requests are always
under way on each lane. Every slice is checked right after it arrived, while the cache still has it: a wrong one is read
once more, then the node is told and the item ends DAMAGED. A lane that dies gives its slices to the others; if none is
left a new one is opened, once.

**Does not cover** which node to ask (`reads`), and what to do about an item that did not come.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from anabranch.core.errors import AnabranchError, Retryable, StaleLease, WireError
from anabranch.core.messages import Message
from anabranch.store.values.got import Got
from anabranch.store.values.grouping import group
from anabranch.store.values.live.attempts import Attempts, Ended
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.crew import WORTH_BYTES, Crew
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.sinks import Sink
from anabranch.store.values.messages import INLINE_BYTES, TIERS, Damaged, Found, Get, Read, Return
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.pace import LanePace
from anabranch.store.values.parts import Parts, sum_of
from anabranch.store.values.scope import NAME_BYTES
from anabranch.store.values.slices import SLICE_BYTES, slice_count
from anabranch.store.values.spread import SliceQueue
from anabranch.transfer.live.workers import Workers
from anabranch.transfer.spread import STALE_S

DEPTH = 3
"""Requests under way on a lane."""
ATTEMPTS = 2
"""How often an item is asked for at one node, if its lease ended or it arrived damaged inline."""
Ask = tuple[list[int], bool]
"""Items (indices), and whether they may come inline."""


class _Lease:
    __slots__ = ("lease", "left")

    def __init__(self, lease: int, left: int) -> None:
        self.lease = lease
        self.left = left


class _Item:
    __slots__ = ("bad", "index", "lease", "left", "parts", "size", "sums", "tier")

    def __init__(self, lease: _Lease, index: int, size: int, sums: Sequence[int], parts: Parts, tier: str) -> None:
        self.lease, self.index, self.size, self.sums, self.parts, self.tier = lease, index, size, sums, parts, tier
        self.left = len(sums)
        self.bad: set[int] = set()


class Fetch:
    """One batch. `names`: NAME_BYTES each; `sinks`: one for each name."""

    def __init__(
        self,
        pool: LanePool,
        workers: Workers,
        names: bytes,
        sinks: Sequence[Sink],
        call: Call,
        *,
        lanes: int,
    ) -> None:
        self._pool = pool
        self._names, self._sinks = names, sinks
        self._call = call
        self._condition = threading.Condition()
        self._crew = Crew(pool, workers, lanes - 1, self._condition, call, self._work, self._lost)
        self._results: list[Got | None] = [None] * len(sinks)
        self._tries = [0] * len(sinks)
        self._asks: deque[Ask] = deque((list(g.items), g.inline) for g in group([sink.room for sink in sinks]))
        self._again: list[int] = []
        self._asked: list[Ask] = []
        self._items: dict[int, _Item] = {}
        self._slices = SliceQueue()
        self._pace = LanePace() if pool.several_rails else None
        self._notices: list[Message] = []
        self._op = 0
        self._arrivals = 0

    def run(self) -> list[Got]:
        """One for each name. UNREACHABLE: the node failed before the item was here. Raises AccessDenied."""
        try:
            attempts = Attempts()
            while attempts.left and self._unfinished:
                attempts.failed(self._attempt(), self._arrivals)
        finally:
            self._crew.leave()
        return [Got(Outcome.UNREACHABLE) if got is None else got for got in self._results]

    def adopt(self, lane: Lane, found: Found) -> None:
        """Somebody has asked for the only item already, and it is leased. Raises WireError."""
        counts = [slice_count(size) for size in found.sizes]
        if len(counts) != 1 or counts[0] != len(found.sums):
            raise WireError(f"{lane.address} found one value and describes {len(counts)}")
        self._asks.clear()
        self._read_later(lane, [0], found, counts)

    @property
    def _unfinished(self) -> bool:
        with self._condition:
            return bool(self._asks or self._again or self._slices.waiting or self._crew.active)

    def _attempt(self) -> Ended:
        """Work on one lane as long as it holds."""
        try:
            lane = self._pool.take(self._call)
        except (Retryable, WireError):
            return Ended.FOR_GOOD
        try:
            self._work(lane, 0)
        except AnabranchError as error:
            with self._condition:
                self._lost(0)
            return self._pool.broken(lane, error, self._call)
        except BaseException:
            self._pool.drop(lane, self._call)
            with self._condition:
                self._lost(0)
            raise
        self._pool.give(lane, self._call)
        return Ended.WELL

    def _work(self, lane: Lane, number: int) -> None:
        under_way: deque[Callable[[Lane], None]] = deque()
        if self._pace is not None and lane.slice_s is not None and time.monotonic() - lane.slice_s[1] < STALE_S:
            with self._condition:
                self._pace.expect(number, lane.slice_s[0])
        while True:
            with self._condition:
                messages, self._notices = self._notices, []
                while len(under_way) < DEPTH and (request := self._next(number, len(under_way))) is not None:
                    messages.append(request[0])
                    under_way.append(request[1])
            if messages:
                lane.send(*messages)
            if under_way:
                under_way.popleft()(lane)
            elif number or not self._more():
                if self._pace is not None:
                    with self._condition:
                        self._pace.left(number)
                return

    def _next(self, number: int, held: int) -> tuple[Message, Callable[[Lane], None]] | None:
        piece = self._slices.next_slice(number) if self._may_take(number, held) else None
        if piece is not None:
            item = self._items[piece[0]]
            request = Read(lease=item.lease.lease, item=item.index, slice=piece[1])
            return request, partial(self._arrived, number, piece, item)
        if number or not self._asks or (self._asked and not self._asks[0][1]):
            return None  # one lease at a time is being asked for: the node need not hold more than it must
        ask = self._asks.popleft()
        self._asked.append(ask)
        self._op += 1
        get = Get(op=self._op, names=self._names_of(ask[0]), limit=INLINE_BYTES if ask[1] else 0)
        return get, partial(self._found, get.op, ask)

    def _may_take(self, number: int, held: int) -> bool:
        """A lane on a slow rail leaves the last slices to the others; the caller's own lane never idles."""
        if self._pace is None or not self._slices.waiting:
            return True
        now = time.monotonic()
        if (number or held) and not self._pace.worth(number, self._slices.waiting, now):
            return False
        self._pace.given(number, now)
        return True

    def _more(self) -> bool:
        """The caller's lane is idle: wait for the crew; whether something is left to do."""
        with self._condition:
            while self._crew.active and not self._slices.waiting:
                self._crew.wait()
            # Not earlier: what a former lease left under way must not land on top of a newer one.
            if self._again:
                self._asks.append((self._again, False))
                self._again = []
            return bool(self._slices.waiting or self._asks or self._notices)

    def _lost(self, number: int) -> None:
        """Under the condition: a lane died."""
        self._slices.lost(number)
        if self._pace is not None:
            self._pace.left(number)
        if number == 0:
            for items, inline in self._asked:
                left = [i for i in items if self._results[i] is None and i not in self._again]
                if left:
                    self._asks.appendleft((left, inline))
            self._asked = []

    # --- answers --------------------------------------------------------------------------------------------------

    def _found(self, op: int, ask: Ask, lane: Lane) -> None:
        found = lane.answer(Found, op)
        items, _ = ask
        if len(found.outcomes) != len(items):
            raise WireError(f"{lane.address} answers for {len(found.outcomes)} values instead of {len(items)}")
        there: list[int] = []
        for i, outcome in zip(items, found.outcomes, strict=True):
            if outcome == Outcome.OK:
                there.append(i)
            else:
                self._results[i] = Got(_outcome(outcome, lane))
        counts = [slice_count(size) for size in found.sizes]
        if len(found.sizes) != len(there) or sum(counts) != len(found.sums):
            raise WireError(f"{lane.address} found {len(there)} values and describes {len(found.sizes)}")
        if found.inline:
            self._receive_inline(lane, there, found, counts)
        elif there:
            self._read_later(lane, there, found, counts)
        with self._condition:
            self._asked.remove(ask)

    def _receive_inline(self, lane: Lane, items: list[int], found: Found, counts: list[int]) -> None:
        at = 0
        batch: list[tuple[int, int, list[memoryview]]] = []  # item, sum, where one slice goes
        waiting = 0
        damaged: set[int] = set()
        fits: list[bool] = []
        for i, size, count in zip(items, found.sizes, counts, strict=True):
            room = self._sinks[i].room
            fits.append(room is None or size <= room)
            parts = self._sinks[i].open(size) if fits[-1] else Parts([memoryview(bytearray(size))])
            for index in range(count):
                views = parts.slice(index, size)
                batch.append((i, found.sums[at], views))
                at += 1
                waiting += min(SLICE_BYTES, size - index * SLICE_BYTES)
                if waiting >= SLICE_BYTES:
                    damaged |= _receive(lane, batch)
                    batch, waiting = [], 0
        damaged |= _receive(lane, batch)
        for position, (i, size) in enumerate(zip(items, found.sizes, strict=True)):
            if not fits[position]:
                self._results[i] = Got(Outcome.TOO_BIG, size)
            elif i in damaged:
                self._try_again(i, Outcome.DAMAGED)
            else:
                self._results[i] = Got(Outcome.OK, size, _tier(found, position))

    def _read_later(self, lane: Lane, items: list[int], found: Found, counts: list[int]) -> None:
        if not found.lease and found.sums:
            raise WireError(f"{lane.address} found values and gave no lease")
        lease = _Lease(found.lease, 0)
        at = wanted = 0
        with self._condition:
            for index, (i, size, count) in enumerate(zip(items, found.sizes, counts, strict=True)):
                sums = found.sums[at : at + count]
                at += count
                room = self._sinks[i].room
                tier = _tier(found, index)
                if room is not None and size > room:
                    self._results[i] = Got(Outcome.TOO_BIG, size)
                    continue
                parts = self._sinks[i].open(size)
                if count == 0:
                    self._results[i] = Got(Outcome.OK, 0, tier)
                    continue
                self._items[i] = _Item(lease, index, size, sums, parts, tier)
                lease.left += 1
                wanted += size
                self._slices.add((i, number) for number in range(count))
            if lease.left == 0 and found.lease:
                self._notices.append(Return(lease=found.lease))
            if wanted >= WORTH_BYTES:
                self._crew.call_in()

    def _arrived(self, number: int, piece: tuple[int, int], item: _Item, lane: Lane) -> None:
        i, index = piece
        views = item.parts.slice(index, item.size)
        size = min(SLICE_BYTES, item.size - index * SLICE_BYTES)
        if not lane.receive_counted(views, size):
            with self._condition:
                self._ended(item.lease)
            raise StaleLease(f"{lane.address} ended a lease")
        good = sum_of(views) == item.sums[index]
        with self._condition:
            if self._pace is not None:
                now = time.monotonic()
                lane.slice_s = self._pace.arrived(number, now), now
            if not self._slices.done(number, piece):
                return
            self._arrivals += 1
            if good:
                item.left -= 1
                if item.left == 0:
                    self._close(i, item, Got(Outcome.OK, item.size, item.tier))
            elif index not in item.bad:
                item.bad.add(index)
                self._slices.add([piece])
            else:
                self._slices.drop(i)
                self._notices.append(Damaged(lease=item.lease.lease, items=[item.index]))
                self._close(i, item, Got(Outcome.DAMAGED, item.size))
            if self._crew.active:
                self._condition.notify_all()

    def _close(self, i: int, item: _Item, got: Got) -> None:
        self._results[i] = got
        item.lease.left -= 1
        if item.lease.left == 0:
            self._notices.append(Return(lease=item.lease.lease))

    def _ended(self, lease: _Lease) -> None:
        """Under the condition: the node does not honour a lease any more."""
        for i, item in list(self._items.items()):
            if item.lease is lease and self._results[i] is None:
                del self._items[i]
                self._slices.drop(i)
                self._try_again(i, Outcome.STALE)

    def _try_again(self, i: int, outcome: Outcome) -> None:
        self._tries[i] += 1
        if self._tries[i] < ATTEMPTS:
            self._again.append(i)
        else:
            self._results[i] = Got(outcome)

    def _names_of(self, items: Sequence[int]) -> bytes:
        if items[-1] - items[0] == len(items) - 1:
            return self._names[items[0] * NAME_BYTES : (items[-1] + 1) * NAME_BYTES]
        return b"".join(self._names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in items)


def _receive(lane: Lane, batch: list[tuple[int, int, list[memoryview]]]) -> set[int]:
    """Fill the places, then check them; the items with a wrong sum."""
    if batch:
        lane.receive_into([view for _, _, views in batch for view in views])
    return {i for i, expected, views in batch if sum_of(views) != expected}


def _outcome(byte: int, lane: Lane) -> Outcome:
    try:
        return Outcome(byte)
    except ValueError as error:
        raise WireError(f"{lane.address} answers with outcome {byte}, which nobody knows") from error


def _tier(found: Found, index: int) -> str:
    place = found.tiers[index] if index < len(found.tiers) else 0
    return TIERS[place] if place < len(TIERS) else ""
