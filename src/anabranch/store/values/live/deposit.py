"""A batch of puts to one node.

Small values go with their message, several in one, and several messages before the first answer. Large ones are offered
in waves: the node grants room for some, their slices go over all lanes, and a seal asks for what did not arrive whole.
The slices of a lane that died are sent again over another. Items for which there was no room are offered again as long
as the rest of their wave made progress.

**Does not cover** which node to ask (`client`).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

import msgspec

from anabranch.core.errors import AnabranchError, Retryable, StaleLease, WireError
from anabranch.store.values.grouping import Group, group
from anabranch.store.values.live.attempts import Attempts, Ended
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.crew import WORTH_BYTES, Crew
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.single import STREAMED_BYTES
from anabranch.store.values.messages import (
    INLINE_BYTES,
    STREAM_BYTES,
    Abandon,
    Exists,
    Granted,
    Offer,
    Presence,
    Put,
    Seal,
    Slice,
    Stored,
)
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import Parts, sum_of
from anabranch.store.values.scope import NAME_BYTES
from anabranch.store.values.slices import slice_count, value_sum
from anabranch.store.values.spread import SliceQueue
from anabranch.transfer.live.workers import Workers

UNANSWERED_PUTS = 6
SEALS = 4
"""How often a wave is sealed until nothing is missing."""


class PutOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an Offer says of all its items."""

    replicas: int = 0
    durable: bool = False
    chain: bool = False
    parent: bytes = b""
    wait_s: float = 1.0


class _Wave:
    """An open put of large items, shared by the lanes that send it. `items`: in the order of the offer."""

    def __init__(self, put: int, items: Sequence[int], granted: list[int], values: Sequence[Parts]) -> None:
        self.put = put
        self.items = items
        self.granted = granted  # positions in the offer
        self.sums = {at: [0] * slice_count(values[items[at]].size) for at in granted}
        self.queue = SliceQueue()
        self.queue.add((at, s) for at in granted for s in range(len(self.sums[at])))
        self.bytes = sum(values[items[at]].size for at in granted)

    def seal(self, op: int) -> Seal:
        return Seal(op=op, put=self.put, sums=[one for at in self.granted for one in self.sums[at]])


class Deposit:
    """One batch. `names`: NAME_BYTES each; `values`: one for each name."""

    def __init__(
        self,
        pool: LanePool,
        workers: Workers,
        names: bytes,
        values: Sequence[Parts],
        options: PutOptions,
        call: Call,
        *,
        lanes: int,
    ) -> None:
        self._pool, self._workers, self._lanes = pool, workers, lanes
        self._names, self._values, self._options = names, values, options
        self._call = call
        self._results: list[Outcome | None] = [None] * len(values)
        self._condition = threading.Condition()
        self._wave: _Wave | None = None
        self._again: set[int] = set()
        self._op = 0
        self._sent = 0

    def run(self) -> list[Outcome]:
        """One for each name. UNREACHABLE: the node failed, or takes nothing any more, before the item was stored.
        Raises AccessDenied."""
        # Over several rails slices are spread; over one a stream keeps both ends busy.
        stream = INLINE_BYTES if self._pool.several_rails else STREAM_BYTES
        sizes = [value.size for value in self._values]
        groups = deque(group(sizes, inline_bytes=stream))
        attempts = Attempts()
        try:
            while groups and attempts.left:
                attempts.failed(self._attempt(groups), self._sent)
        finally:
            self._abandon()
        return [Outcome.UNREACHABLE if outcome is None else outcome for outcome in self._results]

    def _attempt(self, groups: deque[Group]) -> Ended:
        """Work on one lane as long as it holds."""
        try:
            lane = self._pool.take(self._call)
        except (Retryable, WireError):
            return Ended.FOR_GOOD
        try:
            while groups:
                if groups[0].inline:
                    self._put_inline(lane, groups)
                else:
                    self._put_large(lane, groups[0])
                    groups.popleft()
        except AnabranchError as error:
            return self._pool.broken(lane, error, self._call)
        except BaseException:
            self._pool.drop(lane, self._call)
            raise
        self._pool.give(lane, self._call)
        return Ended.WELL

    # --- small ----------------------------------------------------------------------------------------------------

    def _put_inline(self, lane: Lane, groups: deque[Group]) -> None:
        """All leading inline groups; each leaves `groups` when its answer is here."""
        waiting: deque[tuple[int, list[int]]] = deque()
        sent = 0
        while sent < len(groups) or waiting:
            if sent < len(groups) and groups[sent].inline and len(waiting) < UNANSWERED_PUTS:
                items = self._open_items(groups[sent])
                sent += 1
                offer, values = self._offer(items), [self._values[i] for i in items]
                if sum(value.size for value in values) < STREAMED_BYTES:
                    sums = [one for value in values for one in value.sums()]
                    lane.send(Put(offer=offer, sums=sums), payload=[view for value in values for view in value.views])
                else:
                    lane.send_stream(Put(offer=offer), values)
                waiting.append((offer.op, items))
            elif waiting:
                op, items = waiting.popleft()
                self._settle(items, self._stored(lane, op, len(items)).outcomes, lane)
                groups.popleft()
                sent -= 1
                self._send_damaged_again(items, groups)
            else:
                return

    def _send_damaged_again(self, items: Sequence[int], groups: deque[Group]) -> None:
        """Bytes that arrived otherwise than they were sent; once, in case the sender itself is to blame."""
        for i in items:
            if self._results[i] is Outcome.DAMAGED and i not in self._again:
                self._again.add(i)
                self._results[i] = None
                groups.append(Group(i, 1, True))

    def _open_items(self, one: Group) -> list[int]:
        return [i for i in one.items if self._results[i] is None]

    def _settle(self, items: Sequence[int], outcomes: bytes, lane: Lane) -> None:
        for i, byte in zip(items, outcomes, strict=True):
            try:
                self._results[i] = Outcome(byte)
            except ValueError as error:
                raise WireError(f"{lane.address} answers with outcome {byte}, which nobody knows") from error

    def _stored(self, lane: Lane, op: int, count: int) -> Stored:
        stored = lane.answer(Stored, op)
        if not stored.outcomes and count:
            raise StaleLease(f"{lane.address} does not know the put any more")
        if len(stored.outcomes) != count:
            raise WireError(f"{lane.address} answers for {len(stored.outcomes)} values instead of {count}")
        return stored

    def _offer(self, items: Sequence[int]) -> Offer:
        self._op += 1
        options, first = self._options, items[0]
        # A chain is offered in pieces: the first of a piece hangs on the one before it.
        parent = self._name(first - 1) if options.chain and first else options.parent
        if items[-1] - first == len(items) - 1:
            names = self._names[first * NAME_BYTES : (items[-1] + 1) * NAME_BYTES]
        else:
            names = b"".join(map(self._name, items))
        return Offer(
            op=self._op,
            names=names,
            sizes=[self._values[i].size for i in items],
            chain=options.chain,
            parent=parent,
            replicas=options.replicas,
            durable=options.durable,
            wait_s=max(0.0, min(options.wait_s, self._call.left_s / 2)),
        )

    def _name(self, i: int) -> bytes:
        return self._names[i * NAME_BYTES : (i + 1) * NAME_BYTES]

    # --- large ----------------------------------------------------------------------------------------------------

    def _put_large(self, lane: Lane, one: Group) -> None:
        items = self._open_items(one)
        while items:
            stored = self._put_wave(lane, items)
            # What did not fit beside the others may fit now that they can be evicted.
            items = [i for i in items if self._results[i] is Outcome.FULL] if stored and not self._call.over else []

    def _put_wave(self, lane: Lane, items: list[int]) -> int:
        """How many became OK."""
        wave = self._wave
        if wave is not None and wave.items == items:
            # The lane died: the seal says which slices the node still lacks.
            wave.queue = SliceQueue()
            return self._finish(lane, wave)
        offer = self._offer(items)
        lane.send(offer)
        granted = lane.answer(Granted, offer.op)
        if len(granted.outcomes) != len(items):
            raise WireError(f"{lane.address} answers for {len(granted.outcomes)} values instead of {len(items)}")
        wanted = [at for at, byte in enumerate(granted.outcomes) if byte == Outcome.SEND]
        stored = 0
        if wanted:
            self._wave = _Wave(granted.put, items, wanted, self._values)
            stored = self._finish(lane, self._wave)
        else:
            self._settle(items, granted.outcomes, lane)
        self._compare(items, granted)
        return stored

    def _compare(self, items: Sequence[int], granted: Granted) -> None:
        """Of a large value that was there already the node saw the size only."""
        present = [i for i, byte in zip(items, granted.outcomes, strict=True) if byte == Outcome.PRESENT]
        for i, theirs in zip(present, granted.present, strict=False):
            value = self._values[i]
            gone = value_sum(value.size, ())  # of a value that was removed since: it was there, that is all
            if theirs != gone and theirs != value_sum(value.size, value.sums()):
                self._results[i] = Outcome.DIFFERS

    def _finish(self, lane: Lane, wave: _Wave) -> int:
        for _ in range(SEALS):
            self._send_slices(lane, wave)
            self._op += 1
            lane.send(wave.seal(self._op))
            try:
                stored = self._stored(lane, self._op, len(wave.items))
            except StaleLease:
                self._wave = None
                raise
            if not stored.missing:
                self._wave = None
                self._settle(wave.items, stored.outcomes, lane)
                return sum(outcome == Outcome.OK for outcome in stored.outcomes)
            if any(at not in wave.sums or not 0 <= s < len(wave.sums[at]) for at, s in stored.missing):
                raise WireError(f"{lane.address} misses slices that there are not")
            wave.queue.add(stored.missing)
        raise StaleLease(f"slices for {lane.address} were lost {SEALS} times")

    def _send_slices(self, lane: Lane, wave: _Wave) -> None:
        crew = Crew(
            self._pool,
            self._workers,
            self._lanes - 1 if wave.bytes >= WORTH_BYTES and wave.queue.waiting > 1 else 0,
            self._condition,
            self._call,
            partial(self._send_and_wait, wave),
            lambda number: None,  # the seal says what is missing
        )
        try:
            with self._condition:
                crew.call_in()
            while True:
                self._send_all(wave, lane, 0)
                with self._condition:
                    while crew.active and not wave.queue.waiting:
                        crew.wait()
                    if not wave.queue.waiting:
                        return
        finally:
            crew.leave()

    def _send_and_wait(self, wave: _Wave, lane: Lane, number: int) -> None:
        """On another lane than the one of the seal: an answer shows that the node has all of it."""
        if self._send_all(wave, lane, number):
            lane.send(Exists(op=number, names=b""))
            lane.answer(Presence, number)

    def _send_all(self, wave: _Wave, lane: Lane, number: int) -> int:
        count = 0
        while True:
            with self._condition:
                piece = wave.queue.next_slice(number)
            if piece is None:
                return count
            at, index = piece
            value = self._values[wave.items[at]]
            views = value.slice(index, value.size)
            wave.sums[at][index] = sum_ = sum_of(views)
            lane.send(Slice(put=wave.put, item=at, slice=index, sum=sum_), payload=views)
            count += 1
            self._sent += 1

    def _abandon(self) -> None:
        """The call ended early (Ctrl-C, cancelled): the node need not keep room until it notices."""
        wave, self._wave = self._wave, None
        if wave is None or self._pool.resting:
            return
        with contextlib.suppress(AnabranchError), self._pool.lane(Call(0.5)) as lane:
            lane.send(Abandon(put=wave.put))
