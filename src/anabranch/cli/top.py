"""`anabranch top`: the store, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from anabranch.cli.store_caller import administrator, caller_of, with_caller
from anabranch.cli.store_tables import state_of
from anabranch.core.units import format_bytes

if TYPE_CHECKING:
    from anabranch.store.values.rates import StoreRates

TENANTS = 10


@click.command(name="top", epilog="Example: `anabranch top --once --json`")
@click.option("--once", is_flag=True, help="One look, then end.")
@click.option("--interval", "interval_s", default=1.0, show_default=True, metavar="SECONDS", help="Between two looks.")
@with_caller()
def command(once: bool, interval_s: float, as_json: bool, **options: Any) -> int:
    """Watch a store: bytes in and out, hits by tier, evictions, queues and leases of each node, and of each tenant.

    Ctrl-C ends it. With --json each look is one line; --once takes two reports, --interval apart, and ends.
    """
    from anabranch.store.values.rates import rates

    interval_s = max(interval_s, 0.05)
    with administrator(caller_of(**options)) as admin:
        before, at = admin.report(), time.monotonic()

        def look() -> StoreRates:
            nonlocal before, at
            # The pace of the screen, not a wait for anything.
            time.sleep(interval_s)
            report, now = admin.report(), time.monotonic()
            seen = rates(before, report, now - at)
            before, at = report, now
            return seen

        if as_json or once:
            while True:
                seen = look()
                click.echo(msgspec.json.encode(seen).decode()) if as_json else _print(seen)
                if once:
                    return 0 if before.healthy else 1
        return _watch(look)


def _watch(look: Any) -> int:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_screen(look()), refresh=True)
        except KeyboardInterrupt:
            return 0


def _print(seen: StoreRates) -> None:
    from rich.console import Console

    Console().print(_screen(seen))


def _screen(seen: StoreRates) -> Any:
    from rich.console import Group
    from rich.text import Text

    title = f"{len(seen.nodes)} nodes, {seen.keys:.0f} keys, in {_speed(seen.bytes_in)}, out {_speed(seen.bytes_out)}"
    return Group(Text(title, style="bold"), _nodes(seen), Text(""), _tenants(seen))


def _nodes(seen: StoreRates) -> Any:
    table = _table(
        "node", "health", "DRAM", "SSD", "in", "out", "gets/s", "dram", "ssd", "backing", "miss", "evicted/s", "queue",
        "leases",
    )  # fmt: skip
    for node in seen.nodes:
        if node.problem:
            table.add_row(node.node_id, node.problem, style="red")
            continue
        full = f"{format_bytes(node.used_bytes)} of {format_bytes(node.total_bytes)}"
        shares = [f"{100 * node.shares.get(what, 0.0):.0f}%" for what in ("dram", "ssd", "backing", "miss")]
        health = state_of(node.stat, node.accepts) if node.stat is not None else "ok"
        table.add_row(
            node.node_id,
            health,
            full,
            format_bytes(node.ssd_bytes),
            _speed(node.bytes_in),
            _speed(node.bytes_out),
            f"{node.gets:.0f}",
            *shares,
            f"{node.evicted:.0f}",
            format_bytes(node.queue_bytes),
            str(node.leases),
            style="" if health == "ok" else "yellow",
        )
    return table


def _tenants(seen: StoreRates) -> Any:
    table = _table("tenant", "in", "out", "gets/s", "hits", "puts/s")
    for tenant in seen.tenants[:TENANTS]:
        figures = (_speed(tenant.bytes_in), _speed(tenant.bytes_out), f"{tenant.gets:.0f}", f"{100 * tenant.hits:.0f}%")
        table.add_row(tenant.tenant, *figures, f"{tenant.puts:.0f}")
    return table


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right", overflow="fold")
    return table


def _speed(bytes_a_second: float) -> str:
    return f"{format_bytes(round(bytes_a_second))}/s"
