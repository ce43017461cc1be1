"""Hostile frames against a node and a directory that run as processes with secrets.

    python benchmarks/fuzz_store.py [--frames N] [--seed S] [--quick]

Valid, mutated, truncated, oversized and lying frames, absurd numbers and counts, wrong order, no proof or a wrong one,
another tenant's names, leases and puts. Exit code 1 if a target ends, a connection hangs, memory grows by more than
64 MiB, a byte of the other tenant comes back, or that tenant's own work stops. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anabranch.testing.live.store_fuzz import FuzzResult, Secrets, fuzz_directory, fuzz_node
from anabranch.testing.live.targets import Targets

GROWTH_LIMIT = 64 << 20
NODE_SHARE = 0.7
console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, help="in all (default 1,000,000; quick 20,000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a short form")
    args = parser.parse_args()
    frames = args.frames or (20_000 if args.quick else 1_000_000)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-fuzz-"))
    results: dict[str, FuzzResult] = {}
    try:
        secret = Secrets.fresh()
        with Targets(folder, secret) as targets:
            for name, fuzz, share in (("node", fuzz_node, NODE_SHARE), ("directory", fuzz_directory, 1 - NODE_SHARE)):
                target = targets.pids[name]
                results[name] = run(name, fuzz, targets.addresses[name], target, secret, int(frames * share), args.seed)
            tails = {name: targets.log(name) for name in results}
            broken = [f"{name}: unexpected: {text}" for name in results for text in targets.tracebacks(name)[:3]]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, result in results.items():
        show(name, result, tails[name])
    problems = broken + [f"{name}: {problem}" for name, result in results.items() for problem in verdict(result)]
    print(json.dumps(report(results, problems)))
    return 1 if problems else 0


def run(name: str, fuzz: object, address: str, pid: int, secret: Secrets, frames: int, seed: int) -> FuzzResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        task = progress.add_task(name, total=frames, note="")

        def moved(result: FuzzResult) -> None:
            note = f"{result.grown_bytes >> 20} MiB grown, {len(result.problems)} problems"
            progress.update(task, completed=result.report.total, note=note)

        return fuzz(address, pid, secret, frames=frames, seed=seed, progress=moved)  # type: ignore[operator]


def verdict(result: FuzzResult) -> list[str]:
    grown = [f"memory grew by {result.grown_bytes >> 20} MiB"] if result.grown_bytes > GROWTH_LIMIT else []
    return result.problems[:20] + grown


def show(name: str, result: FuzzResult, log: str) -> None:
    table = Table(name, "count")
    for kind, count in (*sorted(result.report.frames.items()), *sorted(result.report.introductions.items())):
        table.add_row(kind, f"{count:,}")
    console.print(table)
    rate = result.report.total / max(result.seconds, 1e-9)
    console.print(
        f"{result.report.connections:,} connections, {rate:,.0f} frames/s, grown {result.grown_bytes:,} bytes"
    )
    for problem in verdict(result):
        console.print(problem, style="red", markup=False)
    if log and verdict(result):
        console.print(log, markup=False)


def report(results: dict[str, FuzzResult], problems: list[str]) -> dict[str, object]:
    return {
        "claim": "hostile frames: no crash, no hang, memory within 64 MiB, no byte of another tenant",
        "holds": not problems,
        "frames": sum(result.report.total for result in results.values()),
        "problems": problems,
        "targets": {
            name: {
                "frames": result.report.total,
                "connections": result.report.connections,
                "grown_bytes": result.grown_bytes,
                "leaked": len(result.report.leaked),
                "hung": result.report.hung,
                "alive": result.alive,
                "seconds": round(result.seconds, 1),
            }
            for name, result in results.items()
        },
        "samples": {name: dict(result.report.frames) for name, result in results.items()},
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())
