"""Planned faults at named steps (`core.faults`), for a test. Random ones: `testing.chaos.faults`."""

from __future__ import annotations

import threading
from collections import Counter

from anabranch.core.faults import Effect

MAX_HANG_S = 60.0


class PlannedFaults:
    """Arm a step and it goes wrong the next `times` times. `fired` counts what happened, by (step, effect)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: dict[str, list[str]] = {}
        self._released = threading.Event()
        self._hanging = 0
        self.fired: Counter[tuple[str, str]] = Counter()

    def arm(self, step: str, effect: str, *, times: int = 1, after: int = 0) -> None:
        """`effect`: fail, short, flip or hang; the first `after` passes are spared."""
        with self._lock:
            self._armed.setdefault(step, []).extend([""] * after + [effect] * times)

    def release(self) -> None:
        """Let everything that hangs go on, now and later."""
        self._released.set()

    @property
    def hanging(self) -> int:
        return self._hanging

    def at(self, step: str) -> Effect:
        with self._lock:
            armed = self._armed.get(step)
            effect = armed.pop(0) if armed else ""
            if effect:
                self.fired[step, effect] += 1
        if effect == "hang":
            with self._lock:
                self._hanging += 1
            self._released.wait(MAX_HANG_S)
            with self._lock:
                self._hanging -= 1
        return _effect(effect)


def _effect(name: str) -> Effect:
    match name:
        case "fail" | "short" | "flip":
            return name
    return ""
