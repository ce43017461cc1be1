"""`anabranch top`: the store, live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click
import msgspec

from anabranch.cli.store_caller import administrator, caller_of, with_caller
from anabranch.cli.store_tables import counted, state_of
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
                if as_json:
                    click.echo(msgspec.json.encode(seen).decode())
                else:
                    _print(seen)
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

    counts = f"{counted(len(seen.nodes), 'node')}, {counted(round(seen.keys), 'key')}"
    title = f"{counts}, in {_speed(seen.bytes_in)}, out {_speed(seen.bytes_out)}"
    problems = [Text(problem, style="red") for problem in seen.problems]
    return Group(Text(title, style="bold"), *problems, _nodes(seen), Text(""), _tenants(seen))


def _nodes(seen: StoreRates) -> Any:
    headings = (
        "node",
        "health",
        "DRAM",
        "full%",
        "SSD",
        "in/s",
        "out/s",
        "gets/s",
        "hit%",
        "d/s/b%",
        "evict/s",
        "queue",
        "leases",
    )
    table = _table(*headings)
    for node in seen.nodes:
        if node.problem:
            table.add_row(node.node_id, node.problem, style="red")
            continue
        hits = [f"{100 * node.shares.get(tier, 0.0):.0f}" for tier in ("dram", "ssd", "backing")]
        health = state_of(node.stat, node.accepts) if node.stat is not None else "ok"
        table.add_row(
            node.node_id,
            health,
            format_bytes(node.used_bytes),
            f"{100 * node.used_bytes / node.total_bytes:.0f}" if node.total_bytes else "-",
            format_bytes(node.ssd_bytes),
            format_bytes(round(node.bytes_in)),
            format_bytes(round(node.bytes_out)),
            f"{node.gets:.0f}",
            f"{100 * (1.0 - node.shares['miss']):.0f}" if node.shares else "-",
            "/".join(hits) if node.shares else "-",
            f"{node.evicted:.0f}",
            format_bytes(node.queue_bytes),
            str(node.leases),
            style="" if health == "ok" else "yellow",
        )
    return table


def _tenants(seen: StoreRates) -> Any:
    table = _table("tenant", "in/s", "out/s", "gets/s", "hit%", "puts/s")
    for tenant in seen.tenants[:TENANTS]:
        speeds = [format_bytes(round(speed)) for speed in (tenant.bytes_in, tenant.bytes_out)]
        hits = f"{100 * tenant.hits:.0f}" if tenant.gets else "-"
        table.add_row(tenant.tenant, *speeds, f"{tenant.gets:.0f}", hits, f"{tenant.puts:.0f}")
    return table


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < 2 else "right", no_wrap=index != 1)
    return table


def _speed(bytes_a_second: float) -> str:
    return f"{format_bytes(round(bytes_a_second))}/s"
