"""Named protocol steps at which a test may make something go wrong.

**Covers** the question asked at each step. **Does not cover** how a fault is chosen (`testing.faults`,
`testing.chaos`). In production the answer is always "": nothing happens.

Steps: ssd.read ssd.write ssd.grow · log.read log.write log.sync log.grow (value log) · backing.store backing.load ·
peer.fetch.request peer.fetch.payload peer.serve.header peer.serve.payload peer.serve.end · push.open push.accept
push.header push.payload push.receive push.finish · directory.lookup directory.announce (these two are asked on the
node's own thread: no hang there).
"""

from __future__ import annotations

from typing import Literal, Protocol

Effect = Literal["", "fail", "short", "flip"]


class Faults(Protocol):
    def at(self, step: str) -> Effect:
        """What must go wrong here: "fail" (as the operation's own error would), "short" (fewer bytes than asked for),
        "flip" (one byte changed), or "". A delay or a hang happens inside this call."""


class NoFaults:
    """Nothing ever goes wrong on purpose."""

    def at(self, step: str) -> Effect:
        return ""


NO_FAULTS = NoFaults()
