"""Figures of a store campaign, and whether it passed."""

from __future__ import annotations

import statistics
from collections import Counter

import msgspec

RECOVERY_TARGET_S = 2.0
DURABLE_TARGET = 0.99


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """One blow. `recovery_s`: until every client had a put and a get that began after the blow and succeeded; None:
    it did not come."""

    victim: str
    kind: str
    at_s: float
    recovery_s: float | None


class CampaignReport(msgspec.Struct, kw_only=True):
    """`calls`: by "kind verdict". `census`: what the nodes held at rest; `leaked`: what of it no value
    needs. `durable`: (acknowledged,
    found after every process was killed and started again). `repaired`: (put with two copies, on two nodes again
    `repair_s` after one was lost for good). `slow`: blows after which service took longer
    than the target. `problems`: everything that makes the campaign fail."""

    seed: int
    seconds: float = 0.0
    strikes: list[Strike] = []
    calls: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    leaked: dict[str, int] = {}
    census: dict[str, int] = {}
    durable: tuple[int, int] = (0, 0)
    repaired: tuple[int, int] = (0, 0)
    repair_s: float = 0.0
    scanned: int = 0
    slow: list[str] = []
    problems: list[str] = []
    interrupted: bool = False

    def total(self, verdict: str) -> int:
        return sum(count for what, count in self.calls.items() if what.endswith(f" {verdict}"))

    @property
    def wrong(self) -> int:
        return self.total("wrong")

    def recoveries(self, victim: str = "") -> list[float]:
        """Sorted seconds, of all strikes or of those on one sort of victim."""
        return sorted(
            strike.recovery_s
            for strike in self.strikes
            if strike.recovery_s is not None and strike.victim.startswith(victim)
        )

    @property
    def passed(self) -> bool:
        return not (self.problems or self.leaked or self.wrong or self.total("stale"))


def share(found: tuple[int, int]) -> float | None:
    asked, there = found
    return round(there / asked, 4) if asked else None


def summary(report: CampaignReport) -> dict[str, object]:
    """For JSON."""
    by_victim = {
        victim: times
        for victim in sorted({strike.victim.rstrip("0123456789-") for strike in report.strikes})
        if (times := report.recoveries(victim))
    }
    return {
        "seed": report.seed,
        "seconds": round(report.seconds, 1),
        "strikes": len(report.strikes),
        "by_kind": dict(Counter(f"{strike.kind} {strike.victim}" for strike in report.strikes)),
        "calls": sum(report.calls.values()),
        "wrong": report.wrong,
        "stale": report.total("stale"),
        "verdicts": {verdict: report.total(verdict) for verdict in ("ok", "miss", "unsure", "error")},
        "recovery_s": {
            victim: {"p50": round(statistics.median(times), 3), "max": round(times[-1], 3)}
            for victim, times in {"all": report.recoveries(), **by_victim}.items()
            if times
        },
        "leaked": report.leaked,
        "durable_hits": share(report.durable),
        "repaired": share(report.repaired),
        "repair_s": round(report.repair_s, 2),
        "scanned": report.scanned,
        "problems": len(report.problems),
        "interrupted": report.interrupted,
    }
