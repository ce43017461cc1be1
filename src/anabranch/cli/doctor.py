"""`anabranch doctor`: can this machine serve, and what to change where it cannot."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anabranch.cli.settings import effective
from anabranch.cluster.fitness import Finding, examine
from anabranch.cluster.live.machine import look
from anabranch.cluster.settings import settings_of

MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


@click.command()
@click.option("--config", "config_file", metavar="FILE", help="TOML file; without it ./anabranch.toml if it exists.")
@click.option("--name", metavar="NAME", help="Cluster to check for.  [default: default]")
@click.option("--port", type=int, metavar="PORT", help="Port to check.  [default: 8000]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, config_file: str | None, name: str | None, port: int | None, as_json: bool) -> None:
    """Check that this machine can serve. Each check is ok, warn or fail, with a remedy; exit code 1 if any fails.

    It looks at the system, Python, processor, memory, shared memory, the data folder and its direct I/O, limits, the
    optional packages, the C compiler, the port, and what dead clusters left behind. It changes nothing.

    \b
    Examples:
      anabranch doctor
      anabranch doctor --port 8001 --json
    """
    resolved = effective(config_file, name=name, port=port)
    findings = examine(look(settings_of(resolved), resolved.problems))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        click.echo(msgspec.json.encode({"ok": not failed, "checks": findings}))
    else:
        _show(findings)
    if failed:
        ctx.exit(1)


def _show(findings: list[Finding]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        remedy = f"\n[bold]→ {escape(finding.remedy)}[/bold]" if finding.remedy else ""
        table.add_row(MARKS[finding.status], finding.check, escape(finding.found) + remedy)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in MARKS}
    console.print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} to fix")


command = doctor
