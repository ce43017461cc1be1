"""Never wrong, soon back: a store of real processes that are killed, stopped and restarted under load.

    python benchmarks/chaos_store.py [--blows N] [--seed S] [--etcd] [--quick]

Three nodes with SSD, directory candidates, etcd if it is asked for, and client processes that put, read, remove, pin
and map values whose bytes follow from their keys. Every byte that comes back is checked. After the storm: what the
nodes still hold, whether values with two
copies have two again when a node is lost for good, and, after every node was killed once more, how much
of what was acknowledged as durable is there. Ctrl-C stops early (exit code 130) and says what it has. Exit code 1 on a
wrong byte, on anything left behind, or when service did not come back. The last line is one JSON object.
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

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anabranch.testing.chaos.live.store_campaign import StorePlan, run_store_campaign
from anabranch.testing.chaos.live.store_rig import RigConfig
from anabranch.testing.chaos.store_report import DURABLE_TARGET, RECOVERY_TARGET_S, CampaignReport, share, summary

console = Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blows", type=int, help="signals (default 500; quick 12)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--etcd", action="store_true", help="two directory candidates, elected through etcd")
    parser.add_argument("--quick", action="store_true", help="a short form")
    args = parser.parse_args()
    blows = args.blows or (12 if args.quick else 500)
    rig = RigConfig()
    if args.etcd:
        rig = msgspec.structs.replace(rig, etcd=True, directories=2)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-chaos-store-"))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        task = progress.add_task("blows", total=blows, note="")

        def moved(report: CampaignReport) -> None:
            note = f"{report.wrong} wrong of {sum(report.calls.values())} calls, {len(report.slow)} slow"
            progress.update(task, completed=len(report.strikes), note=note)

        report = run_store_campaign(StorePlan(seed=args.seed, blows=blows, rig=rig), folder, moved)
    show(report)
    holds = verdict(report)
    if holds:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        console.print(f"logs: {folder / 'logs'}")
    print(json.dumps(result(report, holds)))
    return 130 if report.interrupted else 0 if holds else 1


def verdict(report: CampaignReport) -> bool:
    recoveries = report.recoveries()
    durable, repaired = share(report.durable), share(report.repaired)
    return (
        report.passed
        and bool(recoveries)
        and recoveries[-1] <= RECOVERY_TARGET_S
        and (durable is None or durable >= DURABLE_TARGET)
        and (repaired is None or repaired == 1.0)
    )


def show(report: CampaignReport) -> None:
    table = Table("call", "verdict", "count")
    for what, count in sorted(report.calls.items()):
        table.add_row(*what.rsplit(" ", 1), str(count))
    console.print(table)
    table = Table("victim", "blows", "service back, p50 s", "max s")
    for victim, times in summary(report)["recovery_s"].items():  # type: ignore[attr-defined]
        count = sum(strike.victim.startswith(victim) or victim == "all" for strike in report.strikes)
        table.add_row(victim, str(count), f"{times['p50']:.2f}", f"{times['max']:.2f}")
    console.print(table)
    for what, count in sorted(report.outcomes.items()):
        console.print(f"{what}: {count}", highlight=False)
    console.print(
        f"durable {report.durable}, repaired {report.repaired} in {report.repair_s:.1f} s, scanned {report.scanned}"
    )
    for text in report.slow:
        console.print(f"slow: {text}", style="yellow", markup=False)
    for what, count in report.leaked.items():
        console.print(f"left behind: {what} {count}", style="red", markup=False)
    for problem in report.problems[:50]:
        console.print(problem, style="red", markup=False)


def result(report: CampaignReport, holds: bool) -> dict[str, object]:
    return {
        "claim": "store of real processes under signals: no wrong byte, nothing left behind, service within 2 s, "
        "durable values survive, copies are repaired",
        "holds": holds,
        **summary(report),
        "targets": {"wrong": 0, "leaked": 0, "recovery_s": RECOVERY_TARGET_S, "durable_hits": DURABLE_TARGET},
        "samples": [round(time, 3) for time in report.recoveries()],
        "machine": {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()},
    }


if __name__ == "__main__":
    sys.exit(main())
