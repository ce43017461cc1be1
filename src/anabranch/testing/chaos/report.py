"""Figures of a campaign, and whether it passed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping

import msgspec

from anabranch.testing.chaos.faults import STEPS

# A fault of this step shows in at least one of these counters of a node, an engine or the gateway.
COUNTED_AS: dict[str, tuple[str, ...]] = {
    "ssd.read": ("ssd_read_errors", "integrity_errors"),
    "ssd.write": ("ssd_write_errors", "integrity_errors"),
    "ssd.grow": ("ssd_full",),
    "peer.fetch.request": ("fetch_failures",),
    "peer.fetch.payload": ("fetch_failures", "integrity_errors"),
    "peer.serve.header": ("fetch_failures",),
    "peer.serve.payload": ("fetch_failures", "integrity_errors"),
    "peer.serve.end": ("fetch_failures",),
    "push.open": ("handoffs_out_failed",),
    "push.accept": ("stale_tickets",),
    "push.header": ("handoffs_out_failed",),
    "push.payload": ("handoffs_out_failed", "integrity_errors"),
    "push.receive": ("handoffs_in_failed", "integrity_errors"),
    "push.finish": ("handoffs_out_failed",),
    "directory.lookup": ("lookup_timeouts",),
    "directory.announce": ("resyncs",),
    "control.prepared": ("gateway.retries",),
    "control.prefilled": ("gateway.retries",),
    "control.start": ("gateway.retries",),
    "control.cut": ("gateway.retries",),
}


# What a process may hold when nothing runs.
RESTING = {"free_slots", "evictable_slots", "cached_slots", "ssd_blocks", "sessions", "links"}
RESTING |= {"nodes", "synced_nodes", "blocks"}


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One signal to one process. `recovery_s`: until the next right answer to a request sent after it; None: none came.
    `back_s`: until every process was ready again."""

    process: str
    signal: str
    at_s: float
    recovery_s: float | None
    back_s: float | None


class Report(msgspec.Struct, kw_only=True):
    """`slowest_s`: longest wait for a right answer, and what went on then. `verdicts`: answers by verdict. `refusals`:
    explicit errors by code, for requests that had time enough. `faults`: injected, by "step" and then kind. `census`:
    what was still held at the end. `problems`: everything that makes the campaign fail, with its story. `stories`: of
    the first requests that were very slow, or refused for no fault of their own."""

    mode: str
    seed: int
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""
    verdicts: Counter[str] = msgspec.field(default_factory=Counter)
    refusals: Counter[str] = msgspec.field(default_factory=Counter)
    lost: Counter[str] = msgspec.field(default_factory=Counter)
    faults: dict[str, dict[str, int]] = {}
    counters: dict[str, int] = {}
    usage: dict[str, int] = {}
    kills: list[Kill] = []
    census: dict[str, int] = {}
    scanned: int = 0
    problems: list[str] = []
    stories: list[str] = []
    interrupted: bool = False

    @property
    def requests(self) -> int:
        return sum(self.verdicts.values())

    def waited(self, seconds: float, what: str) -> None:
        """A right answer took this long."""
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, what

    @property
    def passed(self) -> bool:
        return not self.problems and not self.census and not self.verdicts["wrong"]

    def recoveries(self, *, gateway: bool = False) -> list[float]:
        """Seconds to the next right answer, of every kill but (or only) those of the gateway, sorted."""
        return sorted(
            kill.recovery_s
            for kill in self.kills
            if kill.recovery_s is not None and (kill.process == "gateway") == gateway
        )

    def unseen(self) -> list[str]:
        """Named steps at which nothing went wrong, and steps whose faults show in no counter."""
        never = [f"{step}: no fault was injected" for step in STEPS if not self.faults.get(step)]
        silent = [
            f"{step}: {sum(self.faults[step].values())} faults, but none of {', '.join(names)} counted one"
            for step, names in COUNTED_AS.items()
            if self.faults.get(step) and not any(self.counters.get(name) for name in names)
        ]
        return never + silent


def unsettled(process: str, census: Mapping[str, int]) -> dict[str, int]:
    """What a process holds although nothing runs, by "process.what"; {} when it is at rest."""
    held = {f"{process}.{name}": count for name, count in census.items() if count and name not in RESTING}
    pinned = census.get("cached_slots", 0) - census.get("evictable_slots", 0)
    return {**held, f"{process}.pinned_slots": pinned} if pinned else held


def summary(report: Report) -> dict[str, object]:
    """The figures of one campaign, for JSON."""
    recoveries = report.recoveries()
    return {
        "mode": report.mode,
        "seed": report.seed,
        "seconds": round(report.seconds, 1),
        "requests": report.requests,
        "wrong": report.verdicts["wrong"],
        "verdicts": dict(report.verdicts),
        "refusals": dict(report.refusals),
        "lost": dict(report.lost),
        "faults": sum(sum(kinds.values()) for kinds in report.faults.values()),
        "faults_by_step": {step: sum(kinds.values()) for step, kinds in sorted(report.faults.items())},
        "kills": len(report.kills),
        "recovery_s": {
            "p50": round(statistics.median(recoveries), 3) if recoveries else None,
            "max": round(recoveries[-1], 3) if recoveries else None,
            "gateway_max": round(max(report.recoveries(gateway=True), default=0.0), 3),
        },
        "slowest_answer_s": round(report.slowest_s, 2),
        "census": report.census,
        "scanned_blocks": report.scanned,
        "problems": len(report.problems),
        "interrupted": report.interrupted,
    }
