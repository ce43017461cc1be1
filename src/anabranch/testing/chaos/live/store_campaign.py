"""The store campaign: clients call without end, processes are killed, stopped and restarted, every byte is checked."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from anabranch.core.errors import Unavailable
from anabranch.testing.chaos.live.store_audit import Audit
from anabranch.testing.chaos.live.store_caller import Line
from anabranch.testing.chaos.live.store_rig import RigConfig, StoreRig
from anabranch.testing.chaos.store_report import RECOVERY_TARGET_S, CampaignReport, Strike

PATIENCE_S = 20.0
QUIET_S = 30.0


class StorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`pause_s`: mean, between blows. `repair`: lose a node for good at the end."""

    seed: int
    blows: int
    rig: RigConfig = RigConfig()
    pause_s: float = 0.3
    repair: bool = True


class Blow(msgspec.Struct, frozen=True):
    """`kind`: "kill", "stop" (for `stopped_s`, then go on) or "restart" (asked to end)."""

    victim: str
    kind: str
    stopped_s: float = 0.0


def random_blows(victims: list[str], count: int, seed: int) -> list[Blow]:
    """Every victim once, in random order, then again: half are killed, a third stopped, the rest restarted."""
    chance = random.Random(seed)
    blows: list[Blow] = []
    while len(blows) < count:
        for victim in chance.sample(victims, len(victims)):
            draw = chance.random()
            if draw < 1 / 3:
                blows.append(Blow(victim, "stop", chance.uniform(0.1, 1.5)))
            else:
                blows.append(Blow(victim, "kill" if draw < 5 / 6 else "restart"))
    return blows[:count]


class Watch:
    """Reads what the client processes write. Thread-safe."""

    def __init__(self, report: CampaignReport) -> None:
        self._report = report
        self._changed = threading.Condition()
        self._since = 0.0
        self._first: dict[tuple[str, str], float] = {}
        self.stored: set[str] = set()

    def follow(self, name: str, pipe: IO[bytes]) -> None:
        threading.Thread(target=self._read, args=(name, pipe), name=f"{name}-lines", daemon=True).start()

    def mark(self) -> float:
        """From now on, the first success of each kind counts."""
        with self._changed:
            self._first.clear()
            self._since = time.monotonic()
            return self._since

    def wait_success(self, clients: list[str], patience_s: float) -> float | None:
        """Seconds from the mark until all these clients had a put and a get that began after it and succeeded; None: it
        did not come in time."""
        wanted = {(client, kind) for client in clients for kind in ("put", "get")}
        with self._changed:
            if not self._changed.wait_for(lambda: wanted <= self._first.keys(), patience_s):
                return None
            return max(self._first[one] for one in wanted) - self._since

    def missing(self, clients: list[str]) -> list[str]:
        with self._changed:
            return [f"{c} {kind}" for c in clients for kind in ("put", "get") if (c, kind) not in self._first]

    def _read(self, name: str, pipe: IO[bytes]) -> None:
        decoder = msgspec.json.Decoder(Line)
        with pipe:
            for text in pipe:
                try:
                    line = decoder.decode(text)
                except msgspec.DecodeError:
                    continue  # the last words of one that was killed
                with self._changed:
                    self._take(name, line)
                    self._changed.notify_all()

    def _take(self, name: str, line: Line) -> None:
        report = self._report
        for done in line.done:
            report.calls[f"{done.kind} {done.verdict}"] += 1
            if done.verdict == "ok" and done.began_s >= self._since:
                self._first.setdefault((name, done.kind), done.ended_s)
        report.outcomes.update(line.outcomes)
        report.problems += [f"seed {report.seed}: {name}: {story}" for story in line.stories]
        self.stored.update(line.stored)


class Campaign:
    def __init__(
        self,
        rig: StoreRig,
        report: CampaignReport,
        watch: Watch,
        progress: Callable[[CampaignReport], None],
        pause_s: float,
    ) -> None:
        self._rig = rig
        self._report = report
        self._watch = watch
        self._progress = progress
        self._random = random.Random(report.seed + 1)
        self._pause_s = pause_s

    def run(self, blows: list[Blow]) -> None:
        began = time.monotonic()
        self._watch.mark()
        if self._watch.wait_success(self._rig.callers, PATIENCE_S) is None:
            self._report.problems.append(f"no service before the first blow: {self._watch.missing(self._rig.callers)}")
            return
        for blow in blows:
            time.sleep(self._random.expovariate(1 / self._pause_s))
            self._strike(blow, began)
            self._progress(self._report)

    def _strike(self, blow: Blow, began: float) -> None:
        victim = self._rig.resolve(blow.victim)
        others = [caller for caller in self._rig.callers if caller != victim]
        struck = self._watch.mark()
        process = self._rig.victims[victim]
        match blow.kind:
            case "kill":
                process.strike(signal.SIGKILL)
            case "restart":
                process.strike(signal.SIGTERM)
            case _:
                process.strike(signal.SIGSTOP)
                resume = threading.Timer(blow.stopped_s, process.strike, (signal.SIGCONT,))
                resume.start()
        recovery = self._watch.wait_success(others, PATIENCE_S)
        if blow.kind == "stop":
            resume.join()
        where = f"{blow.kind} of {victim} at {struck - began:.1f} s"
        if recovery is None:
            self._report.problems.append(f"no service {PATIENCE_S:.0f} s after {where}: {self._watch.missing(others)}")
        elif recovery > RECOVERY_TARGET_S:
            self._report.slow.append(f"{recovery:.2f} s after {where}")
        self._report.strikes.append(Strike(victim=victim, kind=blow.kind, at_s=struck - began, recovery_s=recovery))


def run_store_campaign(
    plan: StorePlan, folder: Path, progress: Callable[[CampaignReport], None] = lambda report: None
) -> CampaignReport:
    """Runs to the end, or until KeyboardInterrupt; every process is gone on return. `folder` gets logs and data."""
    report = CampaignReport(seed=plan.seed)
    watch = Watch(report)
    rig = StoreRig(folder, plan.rig, plan.seed, watch.follow)
    began = time.monotonic()
    try:
        rig.start()
        rig.start_callers()
        try:
            Campaign(rig, report, watch, progress, plan.pause_s).run(random_blows(rig.choices, plan.blows, plan.seed))
        except KeyboardInterrupt:
            report.interrupted = True
        rig.stop_callers()
        rig.wait_ready()
        Audit(rig, report, plan.rig.traffic, watch.stored).run(repair=plan.repair)
    except Unavailable as error:
        report.problems.append(str(error))
    finally:
        rig.stop()
        report.seconds = time.monotonic() - began
    return report
