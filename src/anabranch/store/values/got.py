"""What a get of one item came to."""

from __future__ import annotations

import msgspec

from anabranch.store.values.outcome import Outcome


class Got(msgspec.Struct, frozen=True):
    """`size`: of the value, 0 if it was not found (with TOO_BIG: what the buffer should have held). `tier`: where the
    bytes came from, "" if they did not come."""

    outcome: Outcome
    size: int = 0
    tier: str = ""

    def __bool__(self) -> bool:
        """The bytes are there."""
        return self.outcome is Outcome.OK


MISSING = Got(Outcome.MISSING)
