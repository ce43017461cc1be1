"""How values come into a node: whole ones behind their message, and slices into their extents."""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence

from anabranch.core.errors import WireError
from anabranch.core.faults import Faults
from anabranch.store.values.entries import Entry
from anabranch.store.values.live.node_custody import Custody, NodeSession, check_items
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.messages import STREAM_BYTES, Abandon, Granted, Offer, Put, Seal, Slice, Stored
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.puts import Item
from anabranch.store.values.puts import Put as OpenPut
from anabranch.store.values.slices import SLICE_BYTES, slice_bounds, slice_count, slice_sum, slice_sums, value_sum

TAKE_OVER_S = 2.0
"""How long a lane that was shut may take to let go of a slice."""
TOLD_S = 60.0
"""A log line that many puts may cause is written at most so often."""
TAKEN_AT_ONCE = 128
"""Items of a large batch that are stored before others get the lock."""
Finish = Callable[[OpenPut, list[Entry]], None]
"""Called outside the lock with the new entries held: makes them durable and replicated as the put asks; it may change
outcomes of items."""
Visible = Callable[[OpenPut, list[Entry]], None]
log = logging.getLogger(__name__)


class PutDesk:
    """`durable`: there is a tier that can make values durable. `finish`: see Finish; only for puts that are
    `unfinished`. `stored` is called under the lock with entries that
    have just become visible."""

    def __init__(
        self,
        custody: Custody,
        faults: Faults,
        unfinished: Callable[[OpenPut], bool],
        finish: Finish,
        stored: Visible,
        *,
        durable: bool,
    ) -> None:
        self._custody = custody
        self._faults = faults
        self._unfinished = unfinished
        self._finish = finish
        self._stored = stored
        self._durable = durable
        self._told = -TOLD_S
        self._writers: dict[tuple[int, int, int], NodeLane] = {}
        """Slices (put, item, slice) that are being received, and on which lane; under the lock."""
        self._written = threading.Condition(custody.lock)

    def put(self, lane: NodeLane, session: NodeSession, message: Put) -> None:
        offer, sums = message.offer, message.sums
        total = sum(offer.sizes)
        if total > STREAM_BYTES or min(offer.sizes, default=0) < 0:
            raise WireError(f"a put of {total} bytes behind its message; at most {STREAM_BYTES}")
        slices = sum(map(slice_count, offer.sizes))
        behind = slices > 0 and not sums
        if not behind and len(sums) != slices:
            raise WireError(f"{len(sums)} sums do not belong to the sizes")
        put = self._begin(session, offer)
        if put is None:
            lane.discard(total + (8 * slices if behind else 0))
            lane.send(Stored(op=offer.op, outcomes=bytes([Outcome.DENIED]) * len(offer.sizes)))
            return
        custody = self._custody
        try:
            if behind:
                right, sums = self._receive_stream(lane, put)
            else:
                right = self._receive(lane, put, sums)
        except BaseException:
            with custody.lock:
                for item in put.items:
                    if item.outcome is Outcome.SEND:
                        custody.puts.refuse(item, Outcome.STALE)
                self._answered(session, put.outcomes)
                custody.notice()
            raise
        entries: list[Entry] = []
        at, more = 0, self._unfinished(put)
        for first in range(0, len(right), TAKEN_AT_ONCE):
            with custody.lock:
                fresh: list[Entry] = []
                for i in range(first, min(first + TAKEN_AT_ONCE, len(right))):
                    item = put.items[i]
                    count = slice_count(item.size)
                    self._take(item, tuple(sums[at : at + count]), right[i], fresh)
                    at += count
                if fresh:
                    self._stored(put, fresh)
                if more:
                    entries += fresh
                else:
                    custody.puts.settle(fresh)
                    if first + TAKEN_AT_ONCE >= len(right):
                        self._over(put, session, True)
        if more:
            self._end(put, entries, session)
        lane.send(Stored(op=offer.op, outcomes=put.outcomes))

    def offer(self, lane: NodeLane, session: NodeSession, message: Offer) -> None:
        put = self._begin(session, message)
        if put is None:
            outcomes = bytes([Outcome.DENIED]) * len(message.sizes)
            lane.send(Granted(op=message.op, put=0, outcomes=outcomes))
            return
        with self._custody.lock:
            number = self._custody.puts.open(put, self._custody.now())
            there = [item for item in put.items if item.outcome is Outcome.PRESENT]
            present = [value_sum(item.size, self._custody.puts.sums_of(item) or ()) for item in there]
            outcomes = put.outcomes
            if not number:
                self._answered(session, outcomes)
        if there and message.durable and not number:
            self._finish(put, [])
            outcomes = put.outcomes
        lane.send(Granted(op=message.op, put=number, outcomes=outcomes, present=present))

    def slice(self, lane: NodeLane, session: NodeSession, message: Slice) -> None:
        custody = self._custody
        key = (message.put, message.item, message.slice)
        with custody.lock:
            put = custody.puts.get(session, message.put)
            stuck = self._writers.get(key) if put is not None else None
            if stuck is not None:
                # Sent again: its sender has given the other lane up, which may not have noticed (a cut cable).
                stuck.shut()
                self._written.wait_for(lambda: key not in self._writers, TAKE_OVER_S)
            place = custody.puts.begin_slice(session, *key, custody.now())
            if place is not None:
                self._writers[key] = lane
        if put is None:
            # How long the slice is, only the put knows: what follows on this lane cannot be understood.
            raise WireError(f"there is no put {message.put}: it was abandoned, or is another caller's")
        if place is None:
            lane.discard(custody.puts.slice_bytes(put, message.item, message.slice))
            return
        start, length = place
        view = custody.memory.data[start : start + length]
        good = False
        try:
            lane.receive_into(view)
            if self._faults.at("node.put.slice") == "flip":
                view[0] ^= 1
            good = slice_sum(view) == message.sum
        finally:
            with custody.lock:
                custody.puts.end_slice(put, message.item, message.slice, message.sum if good else None)
                del self._writers[key]
                self._written.notify_all()
                if not good:
                    custody.shelf.counters["damaged_slices"] += 1
                custody.notice()

    def seal(self, lane: NodeLane, session: NodeSession, message: Seal) -> None:
        custody = self._custody
        with custody.lock:
            put = custody.puts.get(session, message.put)
            if put is None:
                missing: list[tuple[int, int]] = []
                outcomes = b""
            else:
                missing, entries = custody.puts.seal(put, message.sums, custody.now())
                if entries:
                    self._stored(put, entries)
                more = self._unfinished(put)
                if not more:
                    custody.puts.settle(entries)
                    self._over(put, session, not missing)
        if put is not None:
            if more:
                self._end(put, entries, session, over=not missing)
            outcomes = put.outcomes
        # No such put: it was given up, and everything of it is stale.
        lane.send(Stored(op=message.op, outcomes=outcomes, missing=missing))

    def _refuse_barred(self, put: OpenPut) -> None:
        """Under the lock: a node that has not heard of an invalidation yet sends what must be gone."""
        for item in put.items:
            if self._custody.barred(item.scope):
                self._custody.puts.refuse(item, Outcome.STALE)

    def _refuse_durable(self, session: NodeSession, items: int) -> None:
        """Under the lock."""
        self._custody.shelf.counters["durable_refused"] += items
        now = self._custody.now()
        if now >= self._told + TOLD_S:
            self._told = now
            log.warning(
                "tenant '%s' puts durable values, and this node has neither an SSD tier nor a backing store: they are "
                "refused (denied). Start the node with --ssd or --backing, or put without durable=True",
                session.caller.tenant,
            )

    def abandon(self, session: NodeSession, message: Abandon) -> None:
        with self._custody.lock:
            put = self._custody.puts.get(session, message.put)
            if put is not None:
                self._custody.puts.abandon(put)
                self._answered(session, put.outcomes)
                self._custody.notice()

    # --- parts ----------------------------------------------------------------------------------------------------

    def _begin(self, session: NodeSession, offer: Offer) -> OpenPut | None:
        check_items(offer.sizes)
        custody = self._custody
        with custody.lock:
            custody.ledger.asked("put", session.caller.tenant, len(offer.sizes))
            scopes = custody.scopes_of(session, offer.scopes, len(offer.sizes))
            if offer.durable and not self._durable:
                scopes = None
                self._refuse_durable(session, len(offer.sizes))
            if scopes is None:
                self._answered(session, bytes([Outcome.DENIED]) * len(offer.sizes))
                return None
            put = custody.puts.begin(
                session,
                scopes,
                offer.names,
                offer.sizes,
                chain=offer.chain,
                parent=offer.parent,
                durable=offer.durable,
                replicas=offer.replicas,
            )
            if session.peer:
                self._refuse_barred(put)
        while put.unfinished:
            time.sleep(0)  # others first
            with custody.lock:
                custody.puts.place(put)
        full = any(item.outcome is Outcome.FULL for item in put.items)
        if full and offer.wait_s > 0:
            custody.wait_for_room(put, offer.wait_s)
        return put

    def _receive(self, lane: NodeLane, put: OpenPut, sums: Sequence[int]) -> list[bool]:
        """Bytes into their places; whether each item has the sums that it should."""
        data = self._custody.memory.data
        views = []
        for item in put.items:
            if item.outcome is Outcome.SEND:
                views.append(data[item.start : item.start + item.size])
            else:
                views.append(memoryview(bytearray(item.size)))
        if len(views) == 1:
            lane.receive_into(views[0])
        else:
            lane.receive_many(views)
        if self._faults.at("node.put.inline") == "flip":
            views[0][0] ^= 1
        right, at = [], 0
        for view in views:
            own = slice_sums(view) if len(view) > 0 else []
            right.append(own == list(sums[at : at + len(own)]))
            at += len(own)
        return right

    def _receive_stream(self, lane: NodeLane, put: OpenPut) -> tuple[list[bool], list[int]]:
        """As `_receive`, for sums that come behind the bytes; each slice is read while the cache still has it."""
        data = self._custody.memory.data
        own: list[int] = []
        for item in put.items:
            wanted = item.outcome is Outcome.SEND
            scratch = None if wanted else memoryview(bytearray(min(item.size, SLICE_BYTES)))
            for start, end in slice_bounds(item.size):
                view = data[item.start + start : item.start + end] if scratch is None else scratch[: end - start]
                lane.receive_into(view)
                if self._faults.at("node.put.inline") == "flip":
                    view[0] ^= 1
                own.append(slice_sum(view))
        behind = memoryview(bytearray(8 * len(own)))
        lane.receive_into(behind)
        sums = list(struct.unpack(f"<{len(own)}Q", behind))
        right, at = [], 0
        for item in put.items:
            count = slice_count(item.size)
            right.append(own[at : at + count] == sums[at : at + count])
            at += count
        return right, sums

    def _take(self, item: Item, sums: tuple[int, ...], whole: bool, entries: list[Entry]) -> None:
        puts = self._custody.puts
        if not whole:
            self._custody.shelf.counters["damaged_slices"] += 1
            if item.outcome is Outcome.SEND:
                puts.refuse(item, Outcome.DAMAGED)
            return
        if item.outcome is Outcome.SEND:
            entry = puts.commit(item, sums)
            if entry is not None:
                entries.append(entry)
        else:
            puts.compare(item, sums)

    def _over(self, put: OpenPut, session: NodeSession, over: bool) -> None:
        if over:
            self._answered(session, put.outcomes)
            size = sum([item.size for item in put.items if item.outcome == Outcome.OK])
            self._custody.ledger.carried("put", session.caller.tenant, size)
        self._custody.notice()

    def _answered(self, session: NodeSession, outcomes: bytes) -> None:
        self._custody.ledger.answered_all("put", session.caller.tenant, outcomes)

    def _end(self, put: OpenPut, entries: list[Entry], session: NodeSession, *, over: bool = True) -> None:
        try:
            self._finish(put, entries)
        finally:
            with self._custody.lock:
                self._custody.puts.settle(entries)
                self._over(put, session, over)
