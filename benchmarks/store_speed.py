"""Speed of the value store beside Mooncake Store, Redis and a bare socket loop, in one alternating run.

    python benchmarks/store_speed.py [--quick] [--install-peers | --mooncake-python PATH --redis-python PATH]

Every store runs the whole time, each with a client in a process of its own; each point is measured in rounds, one store
after the other in changing order, because a machine's speed drifts. A ratio is the median over rounds of (ours ÷ the
other's in the same round). Figures are over loopback TCP unless they say "same host". A peer that is not installed is
reported as absent. `--driver PATH` runs another driver of the same method set against our node for a cross-check.
The last line is one JSON object; GB/s are 10^9 bytes a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from anabranch.core.errors import AnabranchError, Unavailable

sys.path.insert(0, str(Path(__file__).parent))

from peers import disk, services
from peers.services import Absent, Store

KIB, MIB = 1 << 10, 1 << 20
OURS = "anabranch"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`single`: size → calls a round; `batch`: size → batches a round; `exists`: rounds of 10 × 1,000 keys."""

    rounds: int
    single: dict[int, int]
    batch: dict[int, int]
    items: int = 64
    exists: int
    small: int
    same_host: int
    disk_bytes: int
    segment: int


FULL = Plan(
    rounds=7,
    single={64 * KIB: 300, MIB: 100, 4 * MIB: 40, 16 * MIB: 16},
    batch={64 * KIB: 12, MIB: 3, 4 * MIB: 1, 16 * MIB: 1},
    exists=2, small=20_000, same_host=4, disk_bytes=1 << 30, segment=2 << 30,
)  # fmt: skip
QUICK = Plan(
    rounds=3,
    single={64 * KIB: 60, MIB: 20, 4 * MIB: 10, 16 * MIB: 5},
    batch={64 * KIB: 4, MIB: 1, 4 * MIB: 1},
    exists=1, small=5_000, same_host=2, disk_bytes=192 << 20, segment=640 << 20,
)  # fmt: skip


class Point(msgspec.Struct, kw_only=True):
    """One claim: median figures by store, and `ratio` of ours to `against`, which shall be `wanted` or better."""

    name: str
    unit: str
    figures: dict[str, float]
    against: str
    ratio: float | None
    wanted: float
    at_most: bool = False

    @property
    def holds(self) -> bool | None:
        """None: not measured."""
        if self.ratio is None:
            return None
        return self.ratio <= self.wanted if self.at_most else self.ratio >= self.wanted


class Samples:
    """Figures of rounds: (what, store) → one figure a round."""

    def __init__(self) -> None:
        self._rounds: dict[tuple[str, str], list[float]] = {}
        self.bad: dict[str, int] = {}

    def add(self, what: str, store: str, figure: float) -> None:
        self._rounds.setdefault((what, store), []).append(figure)

    def check(self, store: str, answer: dict[str, Any]) -> dict[str, Any]:
        self.bad[store] = self.bad.get(store, 0) + answer.get("bad", 0)
        return answer

    def point(self, what: str, unit: str, against: str, wanted: float, *, at_most: bool = False, ours: str = OURS,
              name: str = "") -> Point:  # fmt: skip
        """Ratio as the claim wants it: ours ÷ other for costs (`at_most`) and for speeds alike."""
        figures = {store: statistics.median(rounds) for (one, store), rounds in self._rounds.items() if one == what}
        mine, other = self._rounds.get((what, ours)), self._rounds.get((what, against))
        ratio = None
        if mine and other:
            ratio = statistics.median(a / b for a, b in zip(mine, other, strict=False))
        return Point(
            name=name or what, unit=unit, figures={store: round(value, 3) for store, value in figures.items()},
            against=against, ratio=None if ratio is None else round(ratio, 3), wanted=wanted, at_most=at_most,
        )  # fmt: skip


def turns(stores: list[Store], rounds: int) -> Iterator[tuple[int, Store]]:
    for turn in range(rounds):
        for place in range(len(stores)):
            yield turn, stores[(turn + place) % len(stores)]


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, round(share * (len(times) - 1)))]


def measure_single(stores: list[Store], plan: Plan, samples: Samples) -> None:
    for size, count in plan.single.items():
        for _, store in turns(stores, plan.rounds):
            answer = samples.check(store.name, store.reader.ask("single", size=size, count=count))
            for call in ("put", "get"):
                samples.add(f"single {text(size)} {call} p50", store.name, percentile(answer[call], 0.5))
                samples.add(f"single {text(size)} {call} p99", store.name, percentile(answer[call], 0.99))
            store.reader.ask("clear")


def measure_batch(stores: list[Store], plan: Plan, samples: Samples) -> None:
    base = 1
    for size, count in plan.batch.items():
        for _, store in turns(stores, plan.rounds):
            cpu, times = store.cpu_s(), {"put": [], "get": []}  # type: ignore[var-annotated]
            for _ in range(count):
                base += plan.items
                for call in ("put", "get"):
                    answer = store.reader.ask(f"batch_{call}", size=size, items=plan.items, base=base)
                    times[call] += samples.check(store.name, answer)[call]
            moved = 2 * count * plan.items * size / 1e9
            if size >= MIB:  # shorter ones end within a few ticks of the clock
                samples.add("cpu", store.name, (store.cpu_s() - cpu) / moved)
            for call, spent in times.items():
                speed = plan.items * size / 1e3 / statistics.median(spent)
                samples.add(f"batch {plan.items} x {text(size)} {call}", store.name, speed)
            store.reader.ask("clear")


def measure_keys(stores: list[Store], plan: Plan, samples: Samples) -> None:
    asked = [store for store in stores if store.name != "bare"]
    for turn, store in turns(asked, plan.rounds):
        answer = samples.check(
            store.name, store.reader.ask("exists", keys=10_000, batch=1000, rounds=plan.exists, fill=turn == 0)
        )
        samples.add("exists x 1000", store.name, 1e6 * 1000 / statistics.median(answer["exists"]))
        if store.name == OURS and store.local is not None:
            answer = samples.check(
                store.name, store.local.ask("exists", keys=10_000, batch=1000, rounds=plan.exists, fill=False)
            )
            samples.add("exists x 1000", "index", 1e6 * 1000 / statistics.median(answer["exists"]))
    for store in asked:
        store.reader.ask("clear")
    for _, store in turns(asked, plan.rounds):
        answer = samples.check(store.name, store.reader.ask("small", keys=plan.small, batch=1000))
        samples.add("puts of 64 bytes", store.name, plan.small / sum(answer["small"]) * 1e6)
        store.reader.ask("clear")


def measure_same_host(stores: list[Store], plan: Plan, samples: Samples) -> None:
    size = 16 * MIB
    for _, store in turns([store for store in stores if store.local is not None], plan.rounds):
        assert store.local is not None
        answer = samples.check(store.name, store.local.ask("same_host", size=size, values=8, rounds=1 + plan.same_host))
        get, copy = statistics.median(answer["get"]), statistics.median(answer["copy"])
        samples.add("same host get", store.name, size / 1e3 / get)
        if store.name == OURS:
            samples.add("same host get", "memcpy", size / 1e3 / copy)
            samples.add("same host read", OURS, 1e3 / statistics.median(answer["view"]))
        else:
            samples.add("same host read", store.name, 1e3 / get)


def points(plan: Plan, samples: Samples) -> list[Point]:
    found = []
    for size in plan.single:
        for call in ("put", "get"):
            for share in ("p50", "p99"):
                wanted = 0.7 if size < MIB else 0.6
                found.append(
                    samples.point(f"single {text(size)} {call} {share}", "us", "mooncake", wanted, at_most=True)
                )
    found += [
        samples.point(f"batch {plan.items} x {text(size)} {call}", "GB/s", "bare", 0.85)
        for size in FULL.batch
        for call in ("put", "get")
    ]
    found.append(samples.point("cpu", "s/GB", "mooncake", 0.5, at_most=True))
    found.append(
        samples.point("same host read", "reads/ms", "mooncake", 20, name="same host, 16 MiB: view, or Mooncake's copy")
    )
    found.append(samples.point("same host get", "GB/s", "memcpy", 0.9, name="same host, get_into of 16 MiB"))
    found.append(samples.point("exists x 1000", "keys/s", "mooncake", 2, name="exists, through the directory"))
    found.append(samples.point("exists x 1000", "keys/s", "mooncake", 10, ours="index", name="exists, shared index"))
    found.append(samples.point("puts of 64 bytes", "puts/s", "mooncake", 2))
    return found + [samples.point(f"SSD {call}", "GB/s", "raw", 0.8) for call in ("write", "read")]


# --- the run ----------------------------------------------------------------------------------------------------------


def start(
    args: argparse.Namespace, plan: Plan, stack: contextlib.ExitStack, folder: Path
) -> tuple[list[Store], dict[str, str]]:
    """The stores that could be started, and why the others are absent."""
    buffer = max(max(plan.batch) * plan.items, 64 * MIB)
    makers = {
        "mooncake": lambda: services.mooncake(
            folder, plan.segment, buffer, services.find_mooncake(args.mooncake_python, args.install_peers)
        ),
        OURS: lambda: services.anabranch(folder, plan.segment, buffer),
        "redis": lambda: services.redis(
            folder, plan.segment, buffer, *services.find_redis(args.redis_python, args.redis, args.install_peers)
        ),
        "bare": lambda: services.bare(folder, plan.segment, buffer),
    }
    stores, absent = [], {}
    for name, make in makers.items():
        try:
            store = stack.enter_context(make())
            store.reader.ask("prefault", total=int(plan.segment * 0.8))
            stores.append(store)
        except Absent as error:
            if name == OURS:
                raise Unavailable(f"our own store does not run: {error}") from error
            absent[name] = str(error)
            print(f"{name}: absent: {error}")
        else:
            print(f"{name}: {store.version}")
    return stores, absent


def measure(args: argparse.Namespace, plan: Plan, folder: Path) -> tuple[Samples, dict[str, str]]:
    samples = Samples()
    only = set(args.only.split(",")) if args.only else {"single", "batch", "keys", "host", "disk"}
    if "disk" in only:
        for turn in range(plan.rounds):
            for what, figures in disk.speeds(folder, plan.disk_bytes, ours_first=turn % 2 == 1).items():
                for who, speed in figures.items():
                    samples.add(f"SSD {what}", who, speed)
    with contextlib.ExitStack() as stack:
        stores, absent = start(args, plan, stack, folder)
        steps = {"single": measure_single, "batch": measure_batch, "keys": measure_keys, "host": measure_same_host}
        for name, step in steps.items():
            if name in only:
                step(stores, plan, samples)
        if args.driver:
            cross_check(args.driver, stores)
    return samples, absent


def cross_check(driver: str, stores: list[Store]) -> None:
    """The other driver, on our node."""
    ours = next(store for store in stores if store.name == OURS)
    backend = f"{services.HERE}/anabranch_peer.py:Anabranch"
    subprocess.run(
        [sys.executable, driver, "run", "--backend", backend, "--no-start", "--master", ours.master, "--reps", "1",
         "--keys", "0", "--iters", "60", "--single-bytes", "256M", "--batch-bytes", "1G", "--batch-iters", "4",
         "--no-prefault", "--batch-sizes", "64K,1M,4M"],
        check=False,
    )  # fmt: skip


def text(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def show(found: list[Point]) -> None:
    stores = list(dict.fromkeys(store for point in found for store in point.figures))
    print("| point | unit | " + " | ".join(stores) + " | ratio | wanted | |")
    print("|---|---|" + "---:|" * len(stores) + "---:|---:|---|")
    for point in found:
        if not point.figures:
            continue
        cells = " | ".join(f"{point.figures[store]:,.4g}" if store in point.figures else "" for store in stores)
        sign, verdict = (
            "≤" if point.at_most else "≥",
            {None: "not measured", True: "holds", False: "FAILS"}[point.holds],
        )
        ratio = "" if point.ratio is None else f"{point.ratio:.2f} ÷ {point.against}"
        print(f"| {point.name} | {point.unit} | {cells} | {ratio} | {sign} {point.wanted} | {verdict} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no batches of 16 MiB; below 45 s")
    parser.add_argument("--rounds", type=int, help="rounds a point (7; quick 3)")
    parser.add_argument("--only", default="", help="some of: single,batch,keys,host,disk")
    parser.add_argument("--mooncake-python", default="", metavar="PATH", help="Python that has Mooncake's client")
    parser.add_argument("--redis-python", default="", metavar="PATH", help="Python that has redis and hiredis")
    parser.add_argument("--redis", default="", metavar="PATH", help="redis-server or valkey-server")
    parser.add_argument(
        "--install-peers", action="store_true", help=f"install the clients that are missing under {services.CACHE}"
    )
    parser.add_argument("--driver", default="", metavar="PATH", help="another driver, run against our node as well")
    parser.add_argument(
        "--folder", default="", help="where the SSD tier is measured (default: a temporary folder here)"
    )
    args = parser.parse_args()
    plan = QUICK if args.quick else FULL
    if args.rounds:
        plan = msgspec.structs.replace(plan, rounds=args.rounds)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-speed-", dir=args.folder or None))
    try:
        samples, absent = measure(args, plan, folder)
    except AnabranchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = points(plan, samples)
    show(found)
    failing = [point.name for point in found if point.holds is False]
    wrong = sum(samples.bad.values())
    result = {
        "claim": "value store: calls, batches, CPU, same host, look-ups, small puts and SSD, each with its target",
        "holds": not failing and not wrong and any(point.holds for point in found),
        "points": {
            point.name: {"figures": point.figures, "unit": point.unit, "ratio": point.ratio, "against": point.against,
                         "wanted": point.wanted, "at_most": point.at_most, "holds": point.holds}
            for point in found
        },
        "failing": failing,
        "wrong": samples.bad,
        "absent": absent,
        "samples": plan.rounds,
        "quick": args.quick,
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "platform": platform.platform()},
    }  # fmt: skip
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
