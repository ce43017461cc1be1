"""How `anabranch store` shows nodes and values to people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import msgspec

from anabranch.core.units import format_bytes

if TYPE_CHECKING:
    from anabranch.store.messages import Stat
    from anabranch.store.values.report import Listed, StoreReport


def print_report(report: StoreReport) -> None:
    from anabranch.store.metrics import total

    ssd = any(node.stat is not None and "ssd_values" in node.stat.census for node in report.nodes)
    table = _table("node", "address", "health", "values", "DRAM", "SSD", "lanes", "leases", "pins", "gets", "hits")
    for node in report.nodes:
        if node.stat is None:
            table.add_row(node.node_id, node.address, node.problem, style="red")
            continue
        stat = node.stat
        health = state_of(stat, node.accepts)
        counts = [f"{total(stat, name):.0f}" for name in ("lanes", "leases", "pins")]
        table.add_row(
            node.node_id,
            node.address,
            health,
            f"{total(stat, 'values'):.0f}" + (f"+{total(stat, 'ssd_values'):.0f}" if ssd else ""),
            format_bytes(int(total(stat, "used_bytes"))),
            format_bytes(int(total(stat, "ssd_used_bytes"))),
            *counts,
            f"{total(stat, 'items', call='get'):.0f}",
            hit_ratio(stat),
            style="" if health == "ok" else "yellow",
        )
    for directory in report.directories:
        if directory.stat is None:
            table.add_row("directory", directory.address, directory.problem, style="red")
        else:
            role = directory.stat.state.get("role", "")
            keys = f"{total(directory.stat, 'keys'):.0f} keys"
            table.add_row("directory", directory.address, role or "ok", keys)
    click.echo(counted(len(report.nodes), "node") + ("; values: in memory + on SSD" if ssd else ""))
    _print(table)


def counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def print_listed(rows: list[Listed], as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode([as_row(row) for row in rows])))
        return
    table = _table("name", "node", "size", "tier", "uses")
    for row in rows:
        table.add_row(row.name.hex()[:24], row.node_id, format_bytes(row.size), row.tier, str(row.uses))
    _print(table)


def print_copies(key: str, name: bytes, copies: list[Listed], as_json: bool) -> None:
    if as_json:
        found = {"key": key, "name": name.hex(), "copies": [as_row(copy) for copy in copies]}
        click.echo(msgspec.json.format(msgspec.json.encode(found)))
        return
    click.echo(f"{key}: {'missing' if not copies else f'{len(copies)} copies' if len(copies) > 1 else '1 copy'}")
    for copy in copies:
        click.echo(f"  {copy.node_id}  {copy.tier}  {format_bytes(copy.size)}  used {copy.uses} times")


def as_row(row: Listed) -> dict[str, Any]:
    """For JSON: bytes as hexadecimal digits."""
    fields = msgspec.structs.asdict(row)
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in fields.items()}


def state_of(stat: Stat, accepts: bool) -> str:
    """ "ok", or what the node says of itself that is not as it should be."""
    said = [f"{key}: {text}" for key, text in sorted(stat.state.items()) if text and text not in ("ok", "serving")]
    return "; ".join(said) or ("ok" if accepts else "takes no new values")


def hit_ratio(stat: Stat) -> str:
    from anabranch.store.metrics import total

    asked = total(stat, "items", call="get")
    return f"{100 * total(stat, 'items', call='get', outcome='ok') / asked:.0f}%" if asked else "-"


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold", no_wrap=heading != "health")
    return table


def _print(table: Any) -> None:
    from rich.console import Console

    Console().print(table, markup=False)
