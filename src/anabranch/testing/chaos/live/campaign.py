"""The in-process campaign: traffic on a rig, faults at every named step, parts restarted, strangers at the ports."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from anabranch.core.errors import Unavailable
from anabranch.testing.chaos.judge import Outcome, judge
from anabranch.testing.chaos.live.dispatch import DirectClient
from anabranch.testing.chaos.live.ledger import Ledger
from anabranch.testing.chaos.live.rig import MEMBERS, Rig, RigConfig
from anabranch.testing.chaos.live.stranger import Stranger
from anabranch.testing.chaos.report import Report
from anabranch.testing.chaos.workload import Ask, Workload

Progress = Callable[[Report], None]
QUIET_S = 20.0
SCAN_EVERY = 100
SCAN_SLOTS = 24
MOST_PROBLEMS = 20
MOST_STORIES = 5
SLOW_S = 10.0


class InProcess(msgspec.Struct, frozen=True, kw_only=True):
    """`trouble_s`: mean pause between restarts of parts and visits of strangers; 0 = none. `deadline_s`: of a request;
    one whose control message is lost may be refused when it has passed, because its engine is busy and not stalled."""

    requests: int
    seed: int
    concurrency: int = 20
    trouble_s: float = 0.5
    deadline_s: float = 30.0
    rig: RigConfig = RigConfig()


def run_in_process(plan: InProcess, progress: Progress = lambda report: None) -> Report:
    """Runs to the end, or until KeyboardInterrupt; then what there is is reported, and everything is cleaned up."""
    report = Report(mode="in-process", seed=plan.seed)
    started = time.monotonic()
    rig = Rig(plan.seed, plan.rig)
    with rig:
        asyncio.run(_Campaign(plan, rig, report, progress).run())
    report.seconds = time.monotonic() - started
    report.census.update(rig.leftovers())
    return report


class _Campaign:
    def __init__(self, plan: InProcess, rig: Rig, report: Report, progress: Progress) -> None:
        self._plan = plan
        self._rig = rig
        self._report = report
        self._progress = progress
        self._random = random.Random(plan.seed + 1)
        self._workload = Workload(rig.info, plan.seed)
        self._client = DirectClient(rig.info, rig.addresses, time.monotonic, deadline_s=plan.deadline_s)
        self._ledger = Ledger(rig.info, self._client.keys, plan.seed)
        self._stranger = Stranger(rig.info.layout, plan.seed, rig.tickets)
        self._restarts: Counter[tuple[str, str]] = Counter()
        self._left = plan.requests
        self._recent: Ask | None = None

    async def run(self) -> None:
        await self._client.start(len(MEMBERS))
        trouble = asyncio.create_task(self._make_trouble())
        asking = [asyncio.create_task(self._ask_on()) for _ in range(self._plan.concurrency)]
        try:
            await asyncio.gather(*asking)
        except asyncio.CancelledError:
            self._report.interrupted = True
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
            self._client.dispatcher.cancel_all(Unavailable("the campaign was interrupted"))
        finally:
            trouble.cancel()
            await asyncio.gather(trouble, return_exceptions=True)
        await self._settle()
        await self._client.close()

    # --- traffic ------------------------------------------------------------------------------------------------

    async def _ask_on(self) -> None:
        while self._left > 0:
            self._left -= 1
            ask = self._workload.next()
            self._ledger.add(ask)
            self._recent = ask
            sent = time.monotonic()
            seen = await self._client.put(ask)
            self._take(ask, seen, time.monotonic() - sent)
            if self._report.requests % SCAN_EVERY == 0:
                self._scan(SCAN_SLOTS)
            self._progress(self._report)

    def _take(self, ask: Ask, seen: Outcome, seconds: float) -> None:
        report = self._report
        judgement = judge(ask, seen)
        report.verdicts[judgement.verdict] += 1
        if judgement.verdict == "wrong":
            self._problem(
                f"request {ask.number} ({len(ask.tokens)} tokens, n={ask.n}) is wrong: {judgement.reason}",
                self._rig.story(seen.request_id),
            )
        elif judgement.verdict == "right":
            report.waited(seconds, f"request {ask.number}")
            if seconds > SLOW_S:
                self._tell(ask, seen, f"answered after {seconds:.1f} s")
            if min(len(tokens) for tokens in seen.choices) > 1:
                self._consumed(seen.request_id)
        elif judgement.verdict == "refused" and ask.fate != "deadline":
            report.refusals[f"{seen.error}: {seen.message.partition(':')[0]}"] += 1
            self._tell(ask, seen, f"{seen.error}: {seen.message}")

    def _tell(self, ask: Ask, seen: Outcome, what: str) -> None:
        if len(self._report.stories) < MOST_STORIES:
            lines = [f"request {ask.number} ({len(ask.tokens)} tokens, n={ask.n}): {what}"]
            self._report.stories.append("\n  ".join(lines + self._rig.story(seen.request_id)))

    def _consumed(self, request_id: str) -> None:
        """Decode generated, so its last hand-off is over."""
        for attempt, ticket in reversed(list(self._rig.tickets)):
            if attempt.rpartition("/")[0] == request_id:
                self._stranger.consumed(ticket)
                return

    def _problem(self, what: str, story: list[str]) -> None:
        if len(self._report.problems) < MOST_PROBLEMS:
            counters = {key: count for key, count in sorted(self._rig.counters().items()) if count}
            lines = [f"seed {self._plan.seed}: {what}", *story, f"counters: {counters}"]
            self._report.problems.append("\n  ".join(lines))

    def _scan(self, sample: int | None) -> None:
        for node in list(self._rig.nodes.values()):
            for problem in self._ledger.scan(node, sample):
                self._problem(problem, [])
        self._report.scanned = self._ledger.scanned

    # --- trouble ------------------------------------------------------------------------------------------------

    async def _make_trouble(self) -> None:
        if not self._plan.trouble_s:
            return
        while True:
            await asyncio.sleep(self._random.expovariate(1 / self._plan.trouble_s))
            draw = self._random.random()
            if draw < 0.1:
                await self._restart_node()
            elif draw < 0.15:
                self._restarts["restart.directory", "restart"] += 1
                await asyncio.to_thread(self._rig.restart_directory)
            elif draw < 0.35:
                await self._fetch_as_stranger()
            else:
                addresses = [node.address for node in self._rig.nodes.values()]
                await asyncio.to_thread(self._stranger.push, addresses)

    async def _restart_node(self) -> None:
        """Shielded: a node half restarted would be left behind."""
        name, _ = self._random.choice(MEMBERS)
        self._restarts["restart.node", "restart"] += 1

        def restart() -> None:
            self._rig.stop_node(name)
            self._rig.start_node(name)

        await asyncio.shield(asyncio.to_thread(restart))

    async def _fetch_as_stranger(self) -> None:
        ask = self._recent
        if ask is None:
            return
        node = self._random.choice(list(self._rig.nodes.values()))
        other = "b" if ask.tenant == "a" else "a"
        keys = self._client.keys(ask.tokens, ask.tenant)
        await asyncio.to_thread(self._stranger.fetch, node.address, keys, other)

    # --- the end ------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Faults off; everything must come to rest; every block must be what its name says."""
        for faults in self._rig.faults.values():
            faults.off()
        end = time.monotonic() + QUIET_S
        while (held := self._rig.census()) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        report = self._report
        report.census.update(held)
        self._scan(None)
        for (step, kind), count in [*self._rig.fired().items(), *self._restarts.items(), *self._stranger.tried.items()]:
            report.faults.setdefault(step, {})[kind] = count
        report.counters = {**self._rig.counters(), "gateway.retries": self._client.tally.retries}
        report.usage = msgspec.structs.asdict(self._client.tally.usage)
        report.problems += self._stranger.breaches
        report.problems += [f"prompt tokens do not add up: {usage}" for usage in self._client.tally.uneven]
        if not held:
            self._rig.check()
