"""How many pages must stay free when a request is let in.

**Covers** the admission side of paging. **Does not cover** who is preempted when pages run out (`engine.scheduler`).
"""

from __future__ import annotations

import msgspec

from anabranch.core.errors import ConfigError


class Watermark(msgspec.Struct, frozen=True):
    """`keep` pages stay free at admission: running sequences grow into them, so that letting a request in is not
    followed at once by a preemption. Growth of what already runs ignores the watermark."""

    keep: int

    def __post_init__(self) -> None:
        if self.keep < 0:
            raise ConfigError(f"a watermark of {self.keep} pages is impossible; use 0 or more")

    def admits(self, needed: int, *, free: int, running: int) -> bool:
        """May a sequence that needs `needed` more pages start, with `free` pages free or evictable?
        When nothing runs the watermark protects nobody and is waived: the head of the queue always gets its turn."""
        return needed + (self.keep if running else 0) <= free

    def fits(self, needed: int, *, total: int) -> bool:
        """False: the sequence could not even run alone; refuse it instead of letting it wait for ever."""
        return needed <= total
