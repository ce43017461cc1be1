"""Never wrong: traffic whose every answer is known, on a cluster in which everything goes wrong on purpose.

    python benchmarks/chaos.py [--mode in-process|processes|both] [--requests N] [--kills N] [--seed S] [--quick]

`in-process`: directory, nodes, engines and dispatcher with real sockets, arenas and files, and faults injected at every
named step. `processes`: real processes behind the HTTP gateway, killed and stopped at random moments. Ctrl-C stops
early (exit code 130), says what it has, and cleans up. Exit code 1 on a wrong answer, on anything left behind, or, in a
full run, when a named step was never hit. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from anabranch.cluster.live.chaos import campaign_settings
from anabranch.cluster.live.cluster import LocalCluster
from anabranch.cluster.live.entry import model_info
from anabranch.testing.chaos.live.campaign import InProcess, run_in_process
from anabranch.testing.chaos.live.processes import Processes, random_blows, run_processes
from anabranch.testing.chaos.live.rig import RigConfig
from anabranch.testing.chaos.report import COUNTED_AS, Report, summary

SWITCH_S = 0.0005
RECOVERY_TARGET_S = 2.0
console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("in-process", "processes", "both"), default="both")
    parser.add_argument("--requests", type=int, help="in-process requests (default 10000; quick 400)")
    parser.add_argument("--kills", type=int, help="signals to processes (default 40; quick 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=1.0, help="multiplies every fault's rate")
    parser.add_argument("--quick", action="store_true", help="a short form")
    args = parser.parse_args()
    requests = args.requests or (400 if args.quick else 10_000)
    kills = args.kills or (10 if args.quick else 40)
    logging.getLogger("anabranch").setLevel(logging.CRITICAL)  # thousands of failures, all on purpose
    reports: list[Report] = []
    interrupted = False
    try:
        if args.mode != "processes":
            reports.append(in_process(args.seed, requests, args.faults))
        if args.mode != "in-process" and not (reports and reports[-1].interrupted):
            reports.append(processes(args.seed, kills))
    except KeyboardInterrupt:  # while a cluster was starting or stopping
        interrupted = True
    for report in reports:
        show(report)
    interrupted = interrupted or any(report.interrupted for report in reports)
    whole = not (args.quick or interrupted) and requests >= 5000 and args.faults >= 1.0
    unseen = [gap for report in reports if report.mode == "in-process" and whole for gap in report.unseen()]
    for gap in unseen:
        console.print(f"[yellow]{gap}[/yellow]")
    holds = all(report.passed for report in reports) and not unseen
    print(json.dumps(result(reports, holds)))
    return 1 if not holds else 130 if interrupted else 0


def in_process(seed: int, requests: int, scale: float) -> Report:
    plan = InProcess(requests=requests, seed=seed, rig=RigConfig(fault_scale=scale))
    # Many threads wake each other for moments: the usual 5 ms would be most of each hand-over.
    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        with bar() as progress:
            task = progress.add_task("in process", total=requests, note="")

            def moved(report: Report) -> None:
                faults = sum(sum(kinds.values()) for kinds in report.faults.values())
                note = f"{report.verdicts['wrong']} wrong" + (f", {faults} faults" if faults else "")
                progress.update(task, completed=report.requests, note=note)

            return run_in_process(plan, moved)
    finally:
        sys.setswitchinterval(usual)


def processes(seed: int, kills: int) -> Report:
    folder = Path(tempfile.mkdtemp(prefix="anabranch-chaos-"))
    cluster = LocalCluster(campaign_settings(folder))
    keep_logs = False
    try:
        with bar() as progress, cluster:
            names = [status.name for status in cluster.statuses()]
            plan = Processes(seed=seed, blows=random_blows(names, kills, seed))
            task = progress.add_task("processes", total=kills, note="")

            def moved(report: Report) -> None:
                note = f"{report.verdicts['wrong']} wrong of {report.requests} answers"
                progress.update(task, completed=len(report.kills), note=note)

            report = run_processes(plan, cluster, model_info(cluster.spec), moved)
            if not report.passed:
                shutil.copytree(cluster.folder.path / "logs", folder / "logs", dirs_exist_ok=True)
                console.print(f"logs: {folder / 'logs'}")
        prefix = Path(cluster.spec.members[0].arena_path.removesuffix(cluster.spec.members[0].engine_id))
        if left := list(prefix.parent.glob(f"{prefix.name}*")):
            report.census["shared_memory_files"] = len(left)
        keep_logs = not report.passed
        return report
    finally:
        if not keep_logs:
            shutil.rmtree(folder, ignore_errors=True)


def bar() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=console)


def show(report: Report) -> None:
    console.print(
        f"\n[bold]{report.mode}[/bold], seed {report.seed}: {report.requests} requests, {report.seconds:.0f} s"
    )
    table = Table("answers", "count")
    for verdict, count in sorted(report.verdicts.items()):
        table.add_row(verdict, str(count))
    for why, count in sorted((*report.refusals.items(), *report.lost.items())):
        table.add_row(f"  {why}", str(count))
    console.print(table)
    table = Table("named step", "faults", "kinds", "counted as")
    for step, kinds in sorted(report.faults.items()):
        said = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        counted = ", ".join(f"{name} {report.counters.get(name, 0)}" for name in COUNTED_AS.get(step, ()))
        table.add_row(step, str(sum(kinds.values())), said, counted)
    console.print(table)
    if report.kills:
        table = Table("process", "signal", "next answer, s", "all ready, s")
        for kill in sorted(report.kills, key=lambda kill: (kill.process, kill.signal)):
            table.add_row(kill.process, kill.signal, seconds(kill.recovery_s), seconds(kill.back_s))
        console.print(table)
    console.print(f"slowest right answer: {report.slowest_s:.2f} s, {report.slowest}")
    for what, count in report.census.items():
        console.print(f"[red]left behind: {what} {count}[/red]")
    for story in report.stories:
        console.print(story, markup=False)
    for problem in report.problems:
        console.print(problem, style="red", markup=False)


def seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"


def result(reports: list[Report], holds: bool) -> dict[str, object]:
    faults: dict[str, int] = {}
    for report in reports:
        for step, kinds in report.faults.items():
            faults[step] = faults.get(step, 0) + sum(kinds.values())
    recoveries = sorted(time for report in reports for time in report.recoveries())
    gateway = [time for report in reports for time in report.recoveries(gateway=True)]
    recovery: dict[str, float | None] = {
        "p50": round(statistics.median(recoveries), 3) if recoveries else None,
        "max": round(recoveries[-1], 3) if recoveries else None,
        "gateway_max": round(max(gateway), 3) if gateway else None,
        "target": RECOVERY_TARGET_S,
    }
    return {
        "claim": "no wrong answer under faults at every named step and signals to any process; service within 2 s",
        "holds": holds,
        "wrong": sum(report.verdicts["wrong"] for report in reports),
        "requests": sum(report.requests for report in reports),
        "faults_by_step": faults,
        "kills": sum(len(report.kills) for report in reports),
        "recovery_s": recovery,
        "census": {what: count for report in reports for what, count in report.census.items()},
        "samples": {
            "campaigns": [summary(report) for report in reports],
            "recovery_s": [round(time, 3) for time in recoveries],
        },
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())
