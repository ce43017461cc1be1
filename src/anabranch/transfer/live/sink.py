"""Where pushed Layer Blocks of one hand-off land: the ticket is checked, every byte is verified, and it ends once."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable

from anabranch.blocks.checksum import layer_sum
from anabranch.core.errors import IntegrityError, StaleLease, Unavailable, WireError
from anabranch.core.faults import Faults
from anabranch.transfer.live.arena import Arena
from anabranch.transfer.live.landing import Landing
from anabranch.transfer.live.stream import Stream
from anabranch.transfer.messages import PushFrame


class Sink:
    """`ended(reason)` runs once, after the last write: "" when every Layer Block arrived."""

    def __init__(
        self, arena: Arena, secret: bytes, slots: list[int], first: int, faults: Faults, ended: Callable[[str], None]
    ) -> None:
        self._arena = arena
        self._secret = secret
        self._slots = slots
        self._first = first
        self._faults = faults
        self._missing = len(slots) * arena.layout.layers
        self._seen: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self.landing = Landing(ended)

    def begin(self) -> None:
        """A hand-off of nothing is complete at once."""
        if not self._missing:
            self.landing.close("")

    def admits(self, secret: bytes) -> bool:
        return self.landing.open and hmac.compare_digest(secret, self._secret)

    def receive(self, stream: Stream, frame: PushFrame) -> None:
        """Take the bytes behind a frame. Raises WireError for blocks or layers that the ticket does not name, or that
        came before; IntegrityError, StaleLease, Unavailable."""
        indices = [block - self._first for block in frame.blocks]
        places = {(index, frame.layer) for index in indices}
        in_bounds = 0 <= frame.layer < self._arena.layout.layers and all(0 <= i < len(self._slots) for i in indices)
        if not in_bounds or len(frame.sums) != len(indices) or len(places) != len(indices):
            raise WireError("pushed blocks are not what the ticket names")
        with self._lock:
            if places & self._seen:
                raise WireError("a Layer Block was pushed twice")
            self._seen |= places
        views = [self._arena.layer(self._slots[index], frame.layer) for index in indices]
        stream.receive_views(views, self.landing)
        effect = self._faults.at("push.receive")
        if effect == "flip" and views:
            self.landing.copy(views[0][:1], memoryview(bytes([views[0][0] ^ 1])))
        elif effect:
            raise Unavailable("injected")
        for view, expected in zip(views, frame.sums, strict=True):
            if layer_sum(view) != expected:
                raise IntegrityError("a pushed Layer Block arrived damaged")
        if not self.landing.open:
            raise StaleLease("the hand-off ended meanwhile")
        with self._lock:
            self._missing -= len(views)

    @property
    def complete(self) -> bool:
        return self._missing == 0
