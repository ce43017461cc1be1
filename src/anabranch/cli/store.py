"""`anabranch store …`: look after a running store."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from anabranch.cli import store_care
from anabranch.cli.store_caller import administrator, caller_of, with_caller
from anabranch.cli.store_tables import print_copies, print_listed, print_report

if TYPE_CHECKING:
    from anabranch.store.values.live.client import Client

LISTED = 100


@click.group(
    name="store",
    epilog="Example: `anabranch store status` asks the node at 127.0.0.1:7070; `--directory HOST:PORT` asks a whole "
    "store. ANABRANCH_DIRECTORY and ANABRANCH_STORE do the same for every call.",
)
def command() -> None:
    """Look after a running store: its nodes and its values."""


@command.command(epilog="Example: `anabranch store status`")
@with_caller()
def status(as_json: bool, **options: Any) -> int:
    """Show directories and nodes: what they hold, how full they are, what ails them.

    Exits with code 1 when one of them does not answer.
    """
    with administrator(caller_of(**options)) as admin:
        report = admin.report()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(report)))
    else:
        print_report(report)
    return 0 if report.healthy else 1


@command.command(name="ls", epilog="Example: `anabranch store ls --limit 10`")
@click.option("--limit", default=LISTED, show_default=True, metavar="N", help="Rows per node at most; 0 = all.")
@with_caller()
def ls(as_json: bool, limit: int, **options: Any) -> None:
    """List what each node holds: name, size, tier, uses.

    Names are digests of keys: `anabranch store stat KEY` says where one key is. Needs the cluster's secret, if there
    is one.
    """
    with administrator(caller_of(**options)) as admin:
        rows = []
        for address, node_id in admin.addresses().items():
            for count, row in enumerate(admin.entries(address, node_id)):
                if limit and count >= limit:
                    break
                rows.append(row)
    print_listed(rows, as_json)


@command.command(epilog="Example: `anabranch store stat greeting`")
@click.argument("key")
@with_caller()
def stat(key: str, as_json: bool, **options: Any) -> int:
    """Show where a key's copies are. Exits with code 1 if there is none.

    Asking does not count as a use. Needs the cluster's secret, if there is one.
    """
    from anabranch.store.values.scope import Scope

    caller = caller_of(**options)
    with administrator(caller) as admin:
        name, copies = admin.find(key, Scope(caller.tenant, caller.namespace, caller.epoch))
    print_copies(key, name, copies, as_json)
    return 0 if copies else 1


@command.command(epilog="Example: `anabranch store get greeting`")
@click.argument("key")
@click.argument("file", default="-")
@with_caller()
def get(key: str, file: str, as_json: bool, **options: Any) -> int:
    """Write a value to FILE, or to standard output. Exits with code 1 if nobody has it."""
    with _client(options) as client:
        value = client.get(key)
    if value is None:
        _report(as_json, {"key": key, "outcome": "missing"}, f"{key}: missing")
        return 1
    if file == "-":
        sys.stdout.buffer.write(value)
        sys.stdout.buffer.flush()
        return 0
    Path(file).write_bytes(value)
    _report(as_json, {"key": key, "outcome": "ok", "size": len(value), "file": file}, f"{key}: {len(value)} bytes")
    return 0


@command.command(epilog="Example: `echo hello | anabranch store put greeting -`")
@click.argument("key")
@click.argument("file")
@click.option("--replicas", default=0, metavar="N", help="Nodes that shall hold it.  [default: the store's setting]")
@click.option("--durable", is_flag=True, help="On disk before the answer.")
@with_caller()
def put(key: str, file: str, replicas: int, durable: bool, as_json: bool, **options: Any) -> int:
    """Store FILE (`-`: standard input) under KEY. Exits with code 1 if it is not stored."""
    value = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    with _client(options) as client:
        outcome = client.put(key, value, replicas=replicas, durable=durable)
    word = outcome.name.lower()
    _report(as_json, {"key": key, "outcome": word, "size": len(value)}, f"{key}: {word}, {len(value)} bytes")
    return 0 if outcome.stored else 1


@command.command(epilog="Example: `anabranch store rm greeting`")
@click.argument("keys", nargs=-1, required=True, metavar="KEY…")
@with_caller()
def rm(keys: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Remove keys everywhere. Exits with code 1 if one could not be removed; one that is missing is no failure."""
    with _client(options) as client:
        outcomes = [outcome.name.lower() for outcome in client.remove(list(keys))]
    for key, word in zip(keys, outcomes, strict=True):
        _report(as_json, {"key": key, "outcome": word}, f"{key}: {'removed' if word == 'ok' else word}")
    return 0 if set(outcomes) <= {"ok", "missing"} else 1


@command.group()
def secret() -> None:
    """Make secrets."""


@secret.command(name="new", epilog="Example: `anabranch store secret new cluster.secret`")
@click.argument("file")
def secret_new(file: str) -> None:
    """Write a new secret to FILE, readable by you only.

    Give the same file to every directory, node and administrator (--secret-file), or name it for one tenant in the
    tenants file.
    """
    from anabranch.store.values.live.credentials import new_secret

    new_secret(file)
    click.echo(f"{file}: 256 random bits, mode 0600; use it with --secret-file or security.secret_file")


for care in (store_care.verify, store_care.drain, store_care.invalidate):
    command.add_command(care)


def _client(options: dict[str, Any]) -> Client:
    """`anabranch.Client` for the options of a caller."""
    from anabranch.store.values.live.client import Client
    from anabranch.store.values.live.credentials import credentials_of, tls_of

    caller = caller_of(**options)
    security = caller.settings.security
    return Client(
        caller.addresses,
        directory=caller.directory,
        tenant=caller.tenant,
        namespace=caller.namespace,
        epoch=caller.epoch,
        secret=credentials_of(security).secret or None,
        tls=tls_of(security),
        timeout_s=caller.timeout_s,
        name="anabranch-store",
    )


def _report(as_json: bool, row: dict[str, Any], line: str) -> None:
    click.echo(msgspec.json.encode(row).decode() if as_json else line, err=not as_json)
