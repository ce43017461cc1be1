"""Faults of a campaign: at every named step (`core.faults`), seeded, each kind where it makes sense."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Mapping

from anabranch.core.faults import Effect

Kinds = tuple[str, ...]
BYTES: Kinds = ("fail", "short", "flip", "delay")

# What can go wrong at each step, and in how many of its passes it does.
STEPS: dict[str, tuple[float, Kinds]] = {
    "ssd.read": (0.05, (*BYTES, "hang")),
    "ssd.write": (0.02, BYTES),
    "ssd.grow": (0.3, ("fail",)),
    "peer.fetch.request": (0.02, ("fail", "delay")),
    "peer.fetch.payload": (0.01, ("fail", "flip", "delay")),
    "peer.serve.header": (0.02, ("fail", "delay", "hang")),
    "peer.serve.payload": (0.01, BYTES),
    "peer.serve.end": (0.02, ("fail",)),
    "push.open": (0.01, ("fail", "delay")),
    "push.accept": (0.01, ("fail", "delay")),
    "push.header": (0.004, ("fail", "delay")),
    "push.payload": (0.004, (*BYTES, "hang")),
    "push.receive": (0.004, ("fail", "flip", "delay")),
    "push.finish": (0.01, ("fail", "delay")),
    # These are asked on the node's own thread, where nothing may wait.
    "directory.lookup": (0.02, ("fail",)),
    "directory.announce": (0.001, ("fail",)),
    # Between gateway and engine. Tokens are never lost or doubled: their order is the connection's promise.
    "control.prepared": (0.004, ("lose", "double")),
    "control.prefilled": (0.004, ("lose", "double")),
    "control.start": (0.004, ("lose", "double")),
    "control.cancel": (0.1, ("double",)),
    "control.cut": (0.0003, ("cut",)),
    # Between engine and node.
    "port.cut": (0.0001, ("cut",)),
}


class CampaignFaults:
    """One node's faults, random and (`arm`) planned. `fired` counts them by (step, kind). `off` ends them for good."""

    def __init__(
        self,
        seed: int,
        *,
        scale: float = 1.0,
        steps: Mapping[str, tuple[float, Kinds]] = STEPS,
        delay_s: float = 0.02,
        hang_s: float = 1.5,
    ) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._steps = steps
        self._scale = scale
        self._delay_s = delay_s
        self._hang_s = hang_s
        self._armed: dict[str, list[str]] = {}
        self._off = threading.Event()
        self.fired: Counter[tuple[str, str]] = Counter()

    def off(self) -> None:
        """Nothing goes wrong from now on, and what hangs goes on."""
        self._off.set()

    def arm(self, step: str, kind: str, times: int = 1) -> None:
        """The next `times` passes of the step meet this kind of fault."""
        with self._lock:
            self._armed.setdefault(step, []).extend([kind] * times)

    def at(self, step: str) -> Effect:
        kind = self.draw(step)
        match kind:
            case "fail" | "short" | "flip":
                return kind
            case "hang":
                self._off.wait(self._hang_s)
            case "delay":
                self._off.wait(self._delay_s)
        return ""

    def draw(self, step: str) -> str:
        """The kind of fault that this pass meets, counted as having happened; "" for none."""
        rate, kinds = self._steps.get(step, (0.0, ()))
        with self._lock:
            if self._off.is_set():
                return ""
            if armed := self._armed.get(step):
                kind = armed.pop(0)
                self.fired[step, kind] += 1
                return kind
            if self._random.random() >= rate * self._scale:
                return ""
            # A hang costs its time; the other kinds are cheap and come more often.
            weights = [0.1 if kind == "hang" else 1.0 for kind in kinds]
            kind = self._random.choices(kinds, weights)[0]
            self.fired[step, kind] += 1
        return kind
