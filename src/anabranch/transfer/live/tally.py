"""Counters that several threads add to."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Adds are never lost; `snapshot` is a copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def snapshot(self) -> Counter[str]:
        with self._lock:
            return self._counts.copy()
