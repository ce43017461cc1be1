"""Leased views of a node's arena, and copies of what is not there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from anabranch.core.errors import AnabranchError, Retryable, WireError
from anabranch.store.values.got import Got
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.local import LocalMemory
from anabranch.store.values.live.questions import ask
from anabranch.store.values.live.sinks import BytesSink, Sink
from anabranch.store.values.live.views import Views
from anabranch.store.values.messages import MAX_ITEMS, TIERS, Found, Get, Return
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES


class Lease:
    """Places in the arena of the home node, for `names`. Raises what `questions.ask` raises, StaleLease."""

    def __init__(self, pool: LanePool, memory: LocalMemory, names: bytes, call: Call) -> None:
        self._pool, self._memory, self._names = pool, memory, names
        count = len(names) // NAME_BYTES
        self.got: list[Got] = [Got(Outcome.MISSING)] * count
        self.views: list[memoryview | None] = [None] * count
        self.ends = float("inf")
        self._timeout_s = call.left_s
        self._leases: list[int] = []
        self._places: list[tuple[int, int, int]] = []  # item, offset, size
        try:
            for at in range(0, count, MAX_ITEMS):
                self._take(at, call)
        except BaseException:
            self.give_back()
            raise

    def renew(self) -> float | None:
        """A new lease on the same places, and its end; None: it cannot be had."""
        try:
            newer = Lease(self._pool, self._memory, self._names, Call(self._timeout_s))
        except AnabranchError:
            return None
        same = newer._places == self._places
        for view in newer.views:
            if view is not None:
                view.release()
        if not same:
            newer.give_back()
            return None
        former, self._leases = self._leases, newer._leases
        newer._leases = former
        newer.give_back()
        self.ends = newer.ends
        return self.ends

    def give_back(self) -> None:
        """Never raises: a lease that cannot be given back ends by itself."""
        leases, self._leases = self._leases, []
        if leases:
            with contextlib.suppress(AnabranchError), self._pool.lane(Call(self._timeout_s)) as lane:
                lane.send(*[Return(lease=lease) for lease in leases])

    def _take(self, at: int, call: Call) -> None:
        names = self._names[at * NAME_BYTES : (at + MAX_ITEMS) * NAME_BYTES]
        asked = time.monotonic()
        found = ask(self._pool, Get(op=at + 1, names=names, views=True), Found, call)
        if found.lease:
            self._leases.append(found.lease)
            self.ends = min(self.ends, asked + found.lease_s)
        ok = [at + i for i, outcome in enumerate(found.outcomes) if outcome == Outcome.OK]
        if len(found.outcomes) * NAME_BYTES != len(names) or not len(ok) == len(found.sizes) == len(found.offsets):
            raise WireError(f"{self._pool.address} leases places and describes others")
        for i, offset, size, tier in zip(ok, found.offsets, found.sizes, found.tiers, strict=True):
            self._places.append((i, offset, size))
            self.views[i] = self._memory.view(offset, size)
            self.got[i] = Got(Outcome.OK, size, TIERS[tier])


def acquire(
    names: bytes,
    home: LanePool,
    memory: LocalMemory | None,
    read: Callable[[bytes, Sequence[Sink], Call], list[Got]],
    call: Call,
) -> Views:
    """Views of what the home node has if its memory is seen from here; `read` copies of the rest."""
    count = len(names) // NAME_BYTES
    lease: Lease | None = None
    if memory is not None:
        with contextlib.suppress(Retryable, WireError):
            lease = Lease(home, memory, names, call)
    got = [Got(Outcome.MISSING)] * count if lease is None else lease.got
    views: list[memoryview | None] = [None] * count if lease is None else lease.views
    left = [i for i in range(count) if views[i] is None]
    if left:
        try:
            sinks = [BytesSink() for _ in left]
            rest = b"".join([names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in left])
            for i, one, sink in zip(left, read(rest, sinks, call), sinks, strict=True):
                got[i] = one
                views[i] = memoryview(sink.value) if one else None
        except BaseException:
            if lease is not None:
                lease.give_back()
            raise
    return Views(
        got,
        views,
        copied={i for i in left if views[i] is not None},
        ends=float("inf") if lease is None else lease.ends,
        give_back=(lambda: None) if lease is None else lease.give_back,
        renew=(lambda: float("inf")) if lease is None else lease.renew,
        alive=lambda: memory is None or memory.alive,
    )
