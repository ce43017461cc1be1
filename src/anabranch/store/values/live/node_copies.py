"""Who got a copy of a value from this node lately: a removal must reach it, whether or not the directory knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

REMEMBERED = 100_000
REMEMBERED_S = 60.0
"""Long after the directory has heard of it, or the node that got it has left."""


class Copies:
    """Not thread-safe: its owner calls it under its lock. `to`: an address, or another name of a node."""

    def __init__(self) -> None:
        self._copies: OrderedDict[bytes, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._copies)

    def gave(self, names: Iterable[bytes], to: str, now: float) -> None:
        for name in names:
            self._copies.setdefault(name, {})[to] = now
            self._copies.move_to_end(name)
        while self._copies and (len(self._copies) > REMEMBERED or self._oldest() < now - REMEMBERED_S):
            self._copies.popitem(last=False)

    def take(self, names: Iterable[bytes]) -> dict[str, list[bytes]]:
        """Who may have these; forgotten here from now on."""
        found: dict[str, list[bytes]] = {}
        for name in names if self._copies else ():
            for to in self._copies.pop(name, ()):
                found.setdefault(to, []).append(name)
        return found

    def _oldest(self) -> float:
        return max(next(iter(self._copies.values())).values())
