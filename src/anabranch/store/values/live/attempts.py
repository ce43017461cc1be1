"""How often a transfer is taken up again after its lane broke."""

from __future__ import annotations

from enum import Enum

IN_VAIN = 3
IN_ALL = 16


class Ended(Enum):
    """How the work on one lane ended."""

    WELL = 0
    BROKEN = 1
    """Worth another lane."""
    FOR_GOOD = 2


class Attempts:
    """IN_VAIN failures in a row without anything done between them are enough, and IN_ALL in any case."""

    def __init__(self) -> None:
        self._in_vain = 0
        self._in_all = 0
        self._done = 0
        self._over = False

    @property
    def left(self) -> bool:
        return not self._over and self._in_vain < IN_VAIN and self._in_all < IN_ALL

    def failed(self, ended: Ended, done: int) -> None:
        """`done`: a count that grows with progress."""
        self._over = ended is Ended.FOR_GOOD
        if ended is Ended.BROKEN:
            self._in_all += 1
            self._in_vain = 1 if done > self._done else self._in_vain + 1
            self._done = done
