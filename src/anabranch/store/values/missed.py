"""What was invalidated and removed lately: nodes that were away ask those that were not."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from anabranch.store.values.scope import NAME_BYTES

MAX_NAMES = 100_000
MAX_EVENTS = 100_000


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A removal of `names` (32 bytes each), or else an invalidation of a tenant (`epoch` None) or one epoch of it.
    `time`: seconds since 1970 by the clock of the node that was asked; `ident`: the same on all nodes that hear of
    it."""

    time: float
    ident: bytes
    names: bytes = b""
    tenant: str = ""
    epoch: str | None = None


class MissedLog:
    """The latest events. `dropped`: of this time or before, some may be forgotten."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque()
        self.dropped = 0.0
        self._known: set[bytes] = set()
        self._names = 0

    def __len__(self) -> int:
        return len(self.events)

    def add(self, event: Event) -> bool:
        """False: it was known."""
        if event.ident in self._known:
            return False
        self._known.add(event.ident)
        self.events.append(event)
        self._names += len(event.names) // NAME_BYTES
        while self._names > MAX_NAMES or len(self.events) > MAX_EVENTS:
            gone = self.events.popleft()
            self._known.discard(gone.ident)
            self._names -= len(gone.names) // NAME_BYTES
            self.dropped = max(self.dropped, gone.time)
        return True

    def since(self, time: float) -> tuple[list[Event], bool]:
        """Events of that time or later; False: some may be missing."""
        return [event for event in self.events if event.time >= time], self.dropped < time or not self.dropped

    def unknown(self, events: Sequence[Event]) -> list[Event]:
        return [event for event in events if event.ident not in self._known]
