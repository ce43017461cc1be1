"""When a process that died is started again. Pure: deaths and times in, a delay out."""

from __future__ import annotations

import msgspec


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A life shorter than `settled_s` is a rapid failure. The first restart is immediate, then `base_s`, doubling up to
    `most_s`. After `alarm` rapid failures in a row somebody is told why; restarts go on."""

    settled_s: float = 10.0
    base_s: float = 0.05
    most_s: float = 1.0
    alarm: int = 5


class Restart(msgspec.Struct, frozen=True):
    """Start again after `delay_s`. `alarm`: tell somebody, once per series of rapid failures."""

    delay_s: float
    alarm: bool


class RestartPolicy:
    """Memory of one process's deaths."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self.rapid = 0

    def died(self, lived_s: float) -> Restart:
        config = self._config
        self.rapid = self.rapid + 1 if lived_s < config.settled_s else 1
        delay = 0.0 if self.rapid == 1 else min(config.most_s, config.base_s * 2 ** min(self.rapid - 2, 20))
        return Restart(delay, self.rapid == config.alarm)
