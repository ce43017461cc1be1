"""What this client read in a node's memory without a call: the node hears of it a little later, or it would evict what
is read most."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable

from anabranch.core.errors import AnabranchError
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.messages import Found, Get, Return

REPORT_S = 0.5
MOST_NAMES = 1024
"""Names of one report; of more the latest count."""
WAIT_S = 1.0


class Recency:
    """Thread-safe. A report is a question for places that are given back at once."""

    def __init__(self, pool: LanePool, submit: Callable[[Callable[[], None]], bool]) -> None:
        self._pool, self._submit = pool, submit
        self._lock = threading.Lock()
        self._names: dict[bytes, None] = {}
        self._due = time.monotonic() + REPORT_S
        self._ops = itertools.count(1)

    def read(self, names: list[bytes]) -> None:
        now = time.monotonic()
        with self._lock:
            for name in names:
                self._names.pop(name, None)
                self._names[name] = None
            while len(self._names) > MOST_NAMES:
                del self._names[next(iter(self._names))]
            if now < self._due:
                return
            self._due = now + REPORT_S
            report, self._names = self._names, {}
        self._submit(lambda: self._report(b"".join(report)))

    def _report(self, names: bytes) -> None:
        # A hint: a node that is gone has nothing to evict.
        with contextlib.suppress(AnabranchError), self._pool.lane(Call(WAIT_S)) as lane:
            op = next(self._ops)
            lane.send(Get(op=op, names=names, views=True))
            found = lane.answer(Found, op)
            if found.lease:
                lane.send(Return(lease=found.lease))
