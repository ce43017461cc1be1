"""One part of a load on its way into arena slots, from a disk or from a peer."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.landing import Landing


class SegmentTask:
    """`ended(sums, reason, corrupt)` runs exactly once, after the last write; `layers(n)` after each verified layer."""

    def __init__(
        self,
        arena: Arena,
        slots: list[int],
        layers: Callable[[int], None],
        ended: Callable[[list[int | None], str, list[int]], None],
    ) -> None:
        self.arena = arena
        self.slots = slots
        self.sums: list[int | None] = [None] * len(slots)
        self.corrupt: list[int] = []
        self._layers = layers
        self._ended = ended
        self.landing = Landing(self._close)

    def layers_ready(self, layers: int) -> None:
        if self.landing.open:
            self._layers(layers)

    def end(self, reason: str = "") -> None:
        """Done, failed or stopped; the first call counts."""
        self.landing.close(reason)

    def _close(self, reason: str) -> None:
        self._ended(list(self.sums), reason, list(self.corrupt))
