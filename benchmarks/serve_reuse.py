"""What a cached context is worth: TTFT of a 50-token turn on a 4,000-token context, warm against cold, in one run.

    python benchmarks/serve_reuse.py [--quick] [--context N] [--repeat N] [--json FILE]

Real model, real processes. Each figure is a ratio to the cold prompt of the same context in the same run:

    dram        the same engine's node still has the blocks                              target ≤ 0.05
    peer        the engine that has them is stopped; another pulls them over TCP         target ≤ 0.10
    ssd         everything was stopped and started again                                 target ≤ 0.15
    handoff     (full run) prefill and decode on different engines; warm at the decode node
    sessions    (full run) agent sessions: cached tokens per turn short of an ideal cache   target ≤ 1 block

The last line is JSON. `--quick` measures one context and leaves out the last two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from anabranch.cluster.live.cluster import LocalCluster
from anabranch.cluster.settings import Settings
from anabranch.serving.live.endpoint import Endpoint
from anabranch.serving.live.replayer import Replayer
from anabranch.serving.replay import TurnResult, plan_replay, summarize
from anabranch.serving.served import Served
from anabranch.traces.live.files import read_trace

TURN_TOKENS = 50
TARGETS = {"dram": 0.05, "peer": 0.10, "ssd": 0.15}
WORDS = range(1000, 30000)


def settings(folder: Path, *, both: int = 0) -> Settings:
    base = Settings()
    replace = msgspec.structs.replace
    cluster = replace(base.cluster, name="reuse", run_dir=str(folder / "run"), data_dir=str(folder / "data"))
    if both:
        cluster = replace(cluster, prefill=0, decode=0, both=both)
    return replace(
        base,
        cluster=cluster,
        gateway=replace(base.gateway, port=0),
    )


class Runs:
    """Prompts, their answers, and the times by case."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.ttft_s: dict[str, list[float]] = defaultdict(list)
        self.tiers: dict[str, list[dict[str, int]]] = defaultdict(list)

    def prompt(self, number: int) -> list[int]:
        draw = random.Random(number)
        return [draw.choice(WORDS) for _ in range(self.context)]

    def turn(self, number: int, case: str) -> list[int]:
        """The context and a new turn of 50 tokens that no earlier case has sent."""
        draw = random.Random(f"{number} {case}")
        return self.prompt(number) + [draw.choice(WORDS) for _ in range(TURN_TOKENS)]

    async def ask(self, endpoint: Endpoint, model: str, tokens: list[int], case: str) -> Served:
        body = {"model": model, "prompt": tokens, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        served = await endpoint.stream("/v1/completions", body)
        if case:
            self.ttft_s[case].append(served.ttft_s)
            self.tiers[case].append(served.tiers)
            print(f"  {case:8} {served.ttft_s:7.3f} s   {served.tiers}", flush=True)
        return served

    def ratio(self, case: str, base: str = "cold") -> float | None:
        if not self.ttft_s[case]:
            return None
        return round(statistics.median(self.ttft_s[case]) / statistics.median(self.ttft_s[base]), 4)


async def colocated(cluster: LocalCluster, runs: Runs, repeat: int) -> None:
    """Cold, then warm in the same engine, then warm in the other one while the first is stopped."""
    async with Endpoint(cluster.url) as endpoint:
        model = (await endpoint.choose(None)).name
        await runs.ask(endpoint, model, runs.prompt(-1)[:64], "")
        for number in range(repeat):
            await runs.ask(endpoint, model, runs.prompt(number), "cold")
            await runs.ask(endpoint, model, runs.turn(number, "dram"), "dram")
            holder = await engine_that_ran(cluster)
            cluster.signal(holder, signal.SIGSTOP)
            try:
                await until_left(cluster, holder)
                await runs.ask(endpoint, model, runs.turn(number, "peer"), "peer")
            finally:
                cluster.signal(holder, signal.SIGCONT)
                await until_left(cluster, holder, back=True)


async def one_engine(cluster: LocalCluster, runs: Runs, repeat: int, case: str) -> None:
    """The contexts as they are (cold), or with a turn behind them (ssd)."""
    async with Endpoint(cluster.url) as endpoint:
        model = (await endpoint.choose(None)).name
        await runs.ask(endpoint, model, runs.prompt(-1)[:64], "")
        for number in range(2000, 2000 + repeat):
            prompt = runs.prompt(number) if case == "cold" else runs.turn(number, case)
            await runs.ask(endpoint, model, prompt, case)


async def disaggregated(cluster: LocalCluster, runs: Runs, repeat: int) -> None:
    async with Endpoint(cluster.url) as endpoint:
        model = (await endpoint.choose(None)).name
        await runs.ask(endpoint, model, runs.prompt(-1)[:64], "")
        for number in range(1000, 1000 + repeat):
            await runs.ask(endpoint, model, runs.prompt(number), "cold_pd")
            await runs.ask(endpoint, model, runs.turn(number, "handoff"), "handoff")


async def sessions(cluster: LocalCluster) -> dict[str, Any]:
    requests, _ = read_trace("", lenient=False)
    plan = plan_replay(requests, sessions=3, turns=6, context=8192, max_output=16, vocabulary=WORDS, seed=7)
    results: list[TurnResult] = []
    start = time.monotonic()
    async with Endpoint(cluster.url) as endpoint:
        model = (await endpoint.choose(None)).name
        await Replayer(endpoint, model, plan, results.append, block_tokens=16).run(1)
    summary = summarize(results, time.monotonic() - start, 16)
    short = [max(0, turn.ideal_tokens - turn.cached_tokens) / 16 for turn in results if not turn.error]
    return {
        "turns": len(results),
        "failed": summary.failed,
        "blocks_short_per_turn_max": max(short),
        "blocks_short_per_turn_mean": round(statistics.mean(short), 3),
        "ideal_tokens": sum(turn.ideal_tokens for turn in results),
        "cached_tokens": sum(turn.cached_tokens for turn in results),
        "resident_gib": round(cluster.resident_bytes() / (1 << 30), 2),
    }


async def engine_that_ran(cluster: LocalCluster) -> str:
    """The engine whose node holds the most blocks in DRAM: the one that served the context."""
    census = cluster.census()
    nodes = {name: counts for name, counts in census.items() if name.endswith("-node")}
    return max(nodes, key=lambda name: nodes[name].get("cached_slots", 0)).removesuffix("-node")


async def until_left(cluster: LocalCluster, engine: str, *, back: bool = False) -> None:
    """Until the gateway has noticed that the engine does not answer (or answers again)."""
    import httpx

    deadline = time.monotonic() + 30
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        while time.monotonic() < deadline:
            health = (await client.get("/health")).json()
            if (engine in [e["engine_id"] for e in health["engines"]]) == back:
                return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"the gateway did not notice {engine}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one context, colocated cases only")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    repeat = 1 if options.quick else options.repeat
    runs = Runs(options.context)
    agent_sessions: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="anabranch-reuse-") as name:
        folder = Path(name)
        # The prepared model is shared with other runs; only the cache starts empty.
        (folder / "data").mkdir()
        models = Path(Settings().cluster.data_dir or Path.home() / ".local/share/anabranch") / "models"
        if models.is_dir():
            (folder / "data" / "models").symlink_to(models)
        with LocalCluster(settings(folder, both=2)) as cluster:
            asyncio.run(colocated(cluster, runs, repeat))
        # One engine, so that what it reads after the restart is its own disk and not a peer's.
        for case in ("cold", "ssd"):
            with LocalCluster(settings(folder, both=1)) as cluster:
                asyncio.run(one_engine(cluster, runs, repeat, case))
        if not options.quick:
            with LocalCluster(settings(folder)) as cluster:
                asyncio.run(disaggregated(cluster, runs, repeat))
                agent_sessions = asyncio.run(sessions(cluster))
    ratios = {case: runs.ratio(case) for case in TARGETS}
    result = {
        "claim": f"a {TURN_TOKENS}-token turn on {options.context} cached tokens costs a fraction of the cold prompt",
        "ours": ratios,
        "peer": "the same prompt computed from nothing in the same run",
        "limit": TARGETS,
        "ratio": {case: ratio and round(ratio / TARGETS[case], 3) for case, ratio in ratios.items()},
        # A case counts only if its whole context came from where its name says.
        "right_tier": {case: all(tiers[case] == options.context for tiers in runs.tiers[case]) for case in TARGETS},
        "handoff": runs.ratio("handoff", "cold_pd") if runs.ttft_s["handoff"] else None,
        "agent_sessions": agent_sessions,
        "ttft_s": {case: [round(v, 4) for v in values] for case, values in runs.ttft_s.items() if values},
        "tiers": {case: values[-1] for case, values in runs.tiers.items() if values},
        "samples": repeat,
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=2))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
