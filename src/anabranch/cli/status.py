"""`anabranch status`."""

from __future__ import annotations

import click
import msgspec

from anabranch.cli.settings import located
from anabranch.cluster.live.run_folder import default_run_dir
from anabranch.cluster.live.survey import ClusterReport, ProcessReport, survey
from anabranch.core.units import format_bytes


@click.command(epilog="Example: `anabranch status --json | python -m json.tool`.")
@click.option("--name", default=None, metavar="NAME", help="Which cluster.  [default: default]")
@click.option("--config", "config_file", metavar="FILE", help="TOML file; without it ./anabranch.toml if it exists.")
@click.option("--json", "as_json", is_flag=True, help="JSON for programs.")
def command(name: str | None, config_file: str | None, as_json: bool) -> int:
    """Show the members of a running cluster, their health, their load and their memory.

    Exits with code 1 when a process is not healthy or no cluster runs.
    """
    cluster = located(config_file, name)
    report = survey(default_run_dir(cluster), cluster.name)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        _print(report)
    return 0 if report.healthy else 1


def _print(report: ClusterReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"cluster '{report.name}' at {report.url}/v1, model {report.model}, process {report.supervisor_pid}, "
        f"memory {format_bytes(report.resident_bytes)}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("process", "pid", "health", "up", "restarts", "memory", "load"):
        table.add_column(heading, overflow="fold")
    for process in report.processes:
        table.add_row(*_cells(process), style="" if process.health == "ok" else "red")
    console.print(table, markup=False)


def _cells(process: ProcessReport) -> tuple[str, ...]:
    load = " ".join(f"{key}={value:g}" for key, value in process.load.items() if value)
    memory = format_bytes(process.resident_bytes)
    up = f"{process.up_s:.0f}s"
    return process.name, str(process.pid or "-"), process.health, up, str(process.restarts), memory, load
