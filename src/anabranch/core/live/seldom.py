"""Messages that would come many times a second: once, then now and then."""

from __future__ import annotations

import time
from collections import OrderedDict


class Seldom:
    """`due(about)` is True the first time, and then at most once in `every_s`, for each of the last `most` subjects.
    Two threads at once may both be told True."""

    def __init__(self, every_s: float, most: int = 256) -> None:
        self._every_s = every_s
        self._most = most
        self._last: OrderedDict[object, float] = OrderedDict()

    def due(self, about: object = None) -> bool:
        now = time.monotonic()
        last = self._last.get(about)
        if last is not None and now - last < self._every_s:
            return False
        self._last[about] = now
        while len(self._last) > self._most:
            self._last.popitem(last=False)
        return True
