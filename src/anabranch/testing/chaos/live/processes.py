"""The campaign on real processes: traffic over HTTP while processes are killed or stopped.

The cluster itself is given (`Cluster`), because the test kit and the drivers of clusters do not know each other.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from anabranch.core.errors import Unavailable
from anabranch.engine.runner import ModelInfo
from anabranch.testing.chaos.judge import Judgement, judge
from anabranch.testing.chaos.live.http_client import HttpClient
from anabranch.testing.chaos.report import Kill, Report, unsettled
from anabranch.testing.chaos.workload import Shape, Workload

RECOVERY_S = 30.0
QUIET_S = 30.0
STALL_S = 4.0
LOST_PAUSE_S = 0.05
# The gateway prefills prompts with few new tokens where they are decoded, so prompts grow in larger steps here.
SHAPE = Shape(blocks=28, fresh=110, stops=False, deadline=0.0)


class Cluster(Protocol):
    """What `cluster.live.cluster.LocalCluster` offers."""

    @property
    def url(self) -> str: ...

    def signal(self, process: str, number: signal.Signals) -> int: ...

    def wait_ready(self, *, timeout_s: float = 30.0, but: Sequence[int] = ()) -> None: ...

    def census(self) -> dict[str, dict[str, int]]: ...


class Blow(msgspec.Struct, frozen=True):
    """A signal for a process. `stopped_s`: for SIGSTOP, how long until SIGCONT."""

    process: str
    number: signal.Signals
    stopped_s: float = 0.0


class Processes(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic goes on until all `blows` are dealt and `requests` were answered. `pause_s`: mean, between blows."""

    seed: int
    blows: list[Blow]
    requests: int = 0
    concurrency: int = 16
    pause_s: float = 1.0


def random_blows(processes: Sequence[str], count: int, seed: int) -> list[Blow]:
    """Every process once, in random order, then again. Most are killed, a third is stopped for a while, a few (not the
    gateway, which would drain first) are asked to end."""
    chance = random.Random(seed)
    blows: list[Blow] = []
    while len(blows) < count:
        for process in chance.sample(list(processes), len(processes)):
            draw = chance.random()
            if draw < 1 / 3:
                blows.append(Blow(process, signal.SIGSTOP, chance.uniform(0.3, 4.0)))
            elif draw < 1 / 2 and process != "gateway":
                blows.append(Blow(process, signal.SIGTERM))
            else:
                blows.append(Blow(process, signal.SIGKILL))
    return blows[:count]


def run_processes(
    plan: Processes, cluster: Cluster, info: ModelInfo, progress: Callable[[Report], None] = lambda report: None
) -> Report:
    """Runs to the end, or until KeyboardInterrupt; the cluster stays up. `info`: the model that the cluster serves."""
    report = Report(mode="processes", seed=plan.seed)
    started = time.monotonic()
    asyncio.run(_Campaign(plan, cluster, info, report, progress).run())
    report.seconds = time.monotonic() - started
    return report


class _Campaign:
    def __init__(
        self, plan: Processes, cluster: Cluster, info: ModelInfo, report: Report, progress: Callable[[Report], None]
    ) -> None:
        self._plan = plan
        self._cluster = cluster
        self._report = report
        self._progress = progress
        self._random = random.Random(plan.seed + 1)
        self._workload = Workload(info, plan.seed, SHAPE)
        self._client = HttpClient(cluster.url, info.vocab, plan.concurrency)
        self._began = time.monotonic()
        self._answered = asyncio.Condition()
        self._newest = 0.0
        self._open: dict[int, float] = {}
        self._dealt = False
        self._last = "nothing"

    async def run(self) -> None:
        asking = [asyncio.create_task(self._ask_on()) for _ in range(self._plan.concurrency)]
        try:
            await self._deal_blows()
            self._dealt = True
            await asyncio.gather(*asking)
        except asyncio.CancelledError:
            self._report.interrupted = True
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            await self._client.close()
        await self._settle()

    # --- traffic ------------------------------------------------------------------------------------------------

    async def _ask_on(self) -> None:
        report = self._report
        while not self._dealt or report.requests < self._plan.requests:
            ask = self._workload.next()
            sent = self._open[ask.number] = time.monotonic()
            seen = await self._client.put(ask)
            del self._open[ask.number]
            judgement = judge(ask, seen)
            report.verdicts[judgement.verdict] += 1
            if judgement.verdict == "right":
                report.waited(time.monotonic() - sent, f"request {ask.number}, answered after {self._last}")
                async with self._answered:
                    self._newest = max(self._newest, sent)
                    self._answered.notify_all()
            elif judgement.verdict == "wrong":
                self._wrong(ask.number, judgement)
            elif judgement.verdict == "refused":
                report.refusals[f"{seen.error} after {self._last}"] += 1
            elif judgement.verdict == "lost":
                report.lost[f"{seen.message} after {self._last}"] += 1
                await asyncio.sleep(LOST_PAUSE_S)
            self._progress(report)

    def _wrong(self, number: int, judgement: Judgement) -> None:
        self._report.problems.append(
            f"seed {self._plan.seed}: request {number} is wrong, after {self._last}: {judgement.reason}"
        )

    # --- blows --------------------------------------------------------------------------------------------------

    async def _deal_blows(self) -> None:
        await self._recovered(time.monotonic())
        for blow in self._plan.blows:
            await asyncio.sleep(self._random.expovariate(1 / self._plan.pause_s))
            await self._deal(blow)

    async def _deal(self, blow: Blow) -> None:
        self._last = f"{blow.number.name} of {blow.process}"
        struck = time.monotonic()
        pid = self._cluster.signal(blow.process, blow.number)
        resume = asyncio.create_task(self._resume(blow)) if blow.number is signal.SIGSTOP else None
        watch = asyncio.create_task(self._watch_stall())
        recovery = await self._recovered(struck)
        watch.cancel()
        if resume is not None:
            await resume
        killed = [] if blow.number is signal.SIGSTOP else [pid]
        back: float | None = None
        try:
            await asyncio.to_thread(self._cluster.wait_ready, timeout_s=RECOVERY_S, but=killed)
            back = time.monotonic() - struck
        except Unavailable as error:
            self._report.problems.append(f"after {self._last}: {error}")
        if recovery is None:
            self._report.problems.append(f"after {self._last}: no answer within {RECOVERY_S:.0f} s")
        self._report.kills.append(
            Kill(
                process=blow.process,
                signal=blow.number.name,
                at_s=struck - self._began,
                recovery_s=recovery,
                back_s=back,
            )
        )
        step = f"signal.{blow.number.name}"
        kinds = self._report.faults.setdefault(step, {})
        kinds[blow.process] = kinds.get(blow.process, 0) + 1

    async def _watch_stall(self) -> None:
        """When no answer comes for long, put down what everybody holds then."""
        await asyncio.sleep(STALL_S)
        what = f"{STALL_S:.0f} s after {self._last}, with {len(self._open)} requests under way"
        oldest = time.monotonic() - min(self._open.values(), default=time.monotonic())
        held = await asyncio.to_thread(self._held)
        health = await self._client.health()
        self._report.stories.append(f"no answer {what} (oldest {oldest:.1f} s): {held}; gateway: {health}")

    async def _resume(self, blow: Blow) -> None:
        try:
            await asyncio.sleep(blow.stopped_s)
        finally:
            self._cluster.signal(blow.process, signal.SIGCONT)

    async def _recovered(self, since: float) -> float | None:
        """Seconds from `since` to the next right answer to a request sent after it."""
        try:
            async with asyncio.timeout(RECOVERY_S), self._answered:
                await self._answered.wait_for(lambda: self._newest >= since)
        except TimeoutError:
            return None
        return time.monotonic() - since

    # --- the end ------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        end = time.monotonic() + QUIET_S
        while (held := await asyncio.to_thread(self._held)) and time.monotonic() < end:
            await asyncio.sleep(0.1)
        self._report.census = held

    def _held(self) -> dict[str, int]:
        try:
            census = self._cluster.census()
        except Unavailable as error:
            return {f"no answer: {error}": 1}
        held: dict[str, int] = {}
        for process, counts in census.items():
            held.update(unsettled(process, counts))
        return held
