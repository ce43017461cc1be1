"""`anabranch config`."""

from __future__ import annotations

import json

import click

from anabranch.cli.settings import effective, with_settings
from anabranch.cluster.settings import SECTIONS
from anabranch.core.config import DEFAULT_ORIGIN, markdown, masked, refuse, rows


@click.command(
    name="config",
    epilog="Example: `anabranch config --set engine.threads=2` shows what `anabranch up` would run with.",
)
@with_settings
@click.option("--json", "as_json", is_flag=True, help="JSON: {section: {key: {value, origin}}}.")
@click.option("--markdown", "as_markdown", is_flag=True, help="The reference page docs/configuration.md.")
def command(as_json: bool, as_markdown: bool, **options: object) -> None:
    """Print the effective configuration and where each value comes from.

    Exits with code 2, naming every problem, when `anabranch up` would refuse it.
    """
    if as_markdown:
        click.echo(markdown(SECTIONS), nl=False)
        return
    resolved = effective(**options)  # type: ignore[arg-type]  # click delivers what `with_settings` declares
    if as_json:
        click.echo(json.dumps(masked(resolved), indent=2))
    else:
        _print_table(rows(resolved))
    refuse(resolved.problems)


def _print_table(lines: list[tuple[str, str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("key", "value", "origin"):
        table.add_column(heading, overflow="fold")
    for key, value, origin in lines:
        style = "dim" if origin == DEFAULT_ORIGIN else ""
        table.add_row(key, value, origin, style=style)
    Console().print(table, markup=False)
