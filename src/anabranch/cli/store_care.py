"""`anabranch store verify`, `drain` and `invalidate`: what takes long or cannot be taken back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import click
import msgspec

from anabranch.cli.store_caller import administrator, caller_of, with_caller
from anabranch.core.errors import AnabranchError, InvalidInput
from anabranch.core.units import parse_seconds

POLL_S = 0.5
Watch = Callable[[], tuple[float, float]]
"""(done, of how many), as a node itself counts them; (0, 0) while it does not say."""


@click.command(epilog="Example: `anabranch store verify`")
@click.option("--wait", default="1h", show_default=True, metavar="DURATION", help="How long a node may take.")
@with_caller(epoch=False)
def verify(wait: str, as_json: bool, **options: Any) -> int:
    """Read every value of every node and check it; what is damaged is dropped.

    Exits with code 1 if something was damaged or a node did not finish. Needs the cluster's secret, if there is one.
    """
    wait_s = _seconds(wait, "--wait")
    with administrator(caller_of(**options)) as admin:
        nodes = admin.addresses()

        def one(address: str) -> dict[str, int]:
            return dict(admin.verify(address, wait_s).places)

        results = _each(nodes, one, lambda address: lambda: _share(admin, address, "verified", "to_verify"), "verify")
    bad = sum(
        count for result in results if result.places for what, count in result.places.items() if "damaged" in what
    )
    _show(as_json, results, f"{bad} damaged" if bad else "everything that was read is good")
    return 1 if bad or any(result.problem for result in results) else 0


@click.command(epilog="Example: `anabranch store drain --node 127.0.0.1:7070 --deadline 30s`")
@click.argument("names", nargs=-1, metavar="[NODE…]")
@click.option("--deadline", default="60s", show_default=True, metavar="DURATION", help="The node leaves after it.")
@click.option("--force", is_flag=True, help="Even if no node is left that could take the values.")
@with_caller(epoch=False)
def drain(names: tuple[str, ...], deadline: str, force: bool, as_json: bool, **options: Any) -> int:
    """Make nodes leave: they take no new values, hand over what is worth it, and end when readers are done.

    Exits with code 1 if a node left values behind that nobody else has, or did not answer.

    NODE is a node's name or address; without one, those of --node. Needs the cluster's secret, if there is one.
    """
    deadline_s = _seconds(deadline, "--deadline")
    caller = caller_of(**options)
    if not names and not caller.nodes:
        raise InvalidInput("name the node that shall leave, e.g. `anabranch store drain --node 10.0.0.7:7070`")
    with administrator(caller) as admin:
        known = admin.addresses()
        by_name = {node_id: address for address, node_id in known.items()} | {address: address for address in known}
        if unknown := [name for name in names if name not in by_name]:
            raise InvalidInput(f"no node '{unknown[0]}'; there are {', '.join(sorted(filter(None, by_name)))}")
        chosen = {address: known[address] for address in (by_name[name] for name in names or caller.nodes)}

        if not force:
            _somebody_stays(admin, caller.directory, set(known) - set(chosen), chosen)

        def one(address: str) -> dict[str, int]:
            return dict(admin.drain(address, deadline_s).places)

        results = _each(chosen, one, lambda address: lambda: _share(admin, address, "handed_over", "values"), "drain")
    lost = sum(count for result in results for what, count in result.places.items() if what.endswith("/left_behind"))
    _show(as_json, results, f"drained; {lost} values were left behind" if lost else "drained")
    return 1 if lost or any(result.problem for result in results) else 0


def _somebody_stays(admin: Any, directory: str, others: set[str], leaving: dict[str, str]) -> None:
    """Raises InvalidInput if what the leaving nodes hold would have nowhere to go."""
    from anabranch.store.metrics import total

    alone = []
    for address, name in leaving.items():
        try:
            stat = admin.stat(address)
        except AnabranchError:
            continue  # the drain itself says what is wrong
        if total(stat, "alone") or (directory and not others):
            alone.append((name or address, total(stat, "values")))
    if alone:
        raise InvalidInput(
            f"no other node of the store can take what {alone[0][0]} holds ({alone[0][1]:.0f} values in memory): start "
            "one, or add --force to drop them"
        )


@click.command(epilog="Example: `anabranch store invalidate --epoch rev-1 --yes`")
@click.option("--epoch", default=None, metavar="NAME", help="Only this epoch (model revision) of the tenant.")
@click.option("--default-epoch", is_flag=True, help="Only values that were put without an epoch.")
@click.option("--all", "everything", is_flag=True, help="Everything of the tenant.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@with_caller(epoch=False)
def invalidate(
    epoch: str | None, default_epoch: bool, everything: bool, yes: bool, as_json: bool, **options: Any
) -> int:
    """Drop all values of a tenant, or of one epoch of it, in every tier of every node.

    Exits with code 1, naming the places, where it could not be confirmed.
    """
    if epoch == "":
        raise InvalidInput("--epoch is empty: name one, or say --default-epoch for values put without an epoch")
    if (epoch is not None) + default_epoch + everything != 1:
        raise InvalidInput(
            "say what: --epoch NAME for one epoch of the tenant, --default-epoch for values put without one, or --all"
        )
    epoch = "" if default_epoch else epoch
    caller = caller_of(**options)
    part = "everything" if epoch is None else f"epoch '{epoch}'" if epoch else "everything without an epoch"
    what = f"{part} of tenant '{caller.tenant}'"
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidInput(f"this drops {what} in every tier; add --yes")
        click.confirm(f"Drop {what} in every tier?", abort=True)
    with administrator(caller) as admin:
        address = next(iter(admin.addresses()))
        places = admin.invalidate(address, caller.tenant, epoch, caller.timeout_s, everywhere=True).places
    unconfirmed = sorted(place for place, count in places.items() if count < 0)
    gone = sum(count for count in places.values() if count > 0)
    if as_json:
        click.echo(msgspec.json.encode({"gone": gone, "places": places, "unconfirmed": unconfirmed}).decode())
    else:
        click.echo(f"dropped {gone} values of {what}")
        for place in unconfirmed:
            click.secho(
                f"not confirmed: {place}; its values are refused, and go when it is back", fg="yellow", err=True
            )
    return 1 if unconfirmed else 0


class NodeResult(msgspec.Struct, frozen=True):
    node: str
    address: str
    places: dict[str, int] = {}
    problem: str = ""


def _each(
    nodes: dict[str, str], one: Callable[[str], dict[str, int]], watch: Callable[[str], Watch], verb: str
) -> list[NodeResult]:
    """Do it on all nodes at once; on a terminal with a bar for each."""
    with ThreadPoolExecutor(len(nodes)) as pool, _bars(verb) as bars:
        under_way = {address: pool.submit(one, address) for address in nodes}
        rows = {address: bars(nodes[address] or address) for address in nodes}
        pending = set(nodes)
        while pending:
            for address in list(pending):
                try:
                    under_way[address].result(POLL_S / len(pending))
                except TimeoutError:
                    rows[address](*watch(address)())
                    continue
                except AnabranchError:
                    rows[address](0.0, 0.0)
                else:
                    rows[address](1.0, 1.0)
                pending.discard(address)
    results = []
    for address, node in nodes.items():
        error = under_way[address].exception()
        if isinstance(error, AnabranchError):
            results.append(NodeResult(node or address, address, problem=str(error)))
        else:
            results.append(NodeResult(node or address, address, under_way[address].result()))
    return results


@contextmanager
def _bars(verb: str) -> Iterator[Callable[[str], Callable[[float, float], None]]]:
    """Progress bars on standard error if it is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda name: lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:

        def bar(name: str) -> Callable[[float, float], None]:
            task = progress.add_task(f"{verb} {name}", total=None)
            return lambda done, total: progress.update(task, completed=done, total=total or None)

        yield bar


def _share(admin: Any, address: str, done: str, total: str) -> tuple[float, float]:
    from anabranch.store.metrics import total as figure

    try:
        stat = admin.stat(address)
    except AnabranchError:
        return 0.0, 0.0
    return figure(stat, done), figure(stat, total)


def _seconds(text: str, option: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise InvalidInput(f'{option} "{text}": expected a duration such as 30s or 5min') from error


def _show(as_json: bool, results: list[NodeResult], verdict: str) -> None:
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(results)))
        return
    for result in results:
        counts = ", ".join(f"{what} {count}" for what, count in sorted(result.places.items()))
        click.echo(f"{result.node}  {result.problem or counts or 'nothing there'}")
    if not any(result.problem for result in results):
        click.echo(verdict)
