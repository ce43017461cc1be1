"""`anabranch directory`."""

from __future__ import annotations

import click
from msgspec.structs import replace

from anabranch.cli.serving_process import serve
from anabranch.cli.store_settings import SERVER_FLAGS, SERVER_OPTIONS, store_settings, with_options
from anabranch.core.errors import InvalidInput
from anabranch.store.config import DirectoryConfig

LISTEN = "127.0.0.1:7060"
_FLAGS = {
    **{name: ("directory", name) for name in ("listen", "etcd", "shard", "shards", "advertise")},
    **SERVER_FLAGS,
}


@click.command(
    epilog="Example: `anabranch directory --listen 127.0.0.1:7060`, then "
    "`anabranch node --directory 127.0.0.1:7060` in another terminal."
)
@click.option("--listen", metavar="HOST:PORT", help=f"Where nodes and clients connect.  [default: {LISTEN}]")
@click.option("--etcd", metavar="HOST:PORT,…", help="Share the work with others: leaders are chosen through etcd.")
@click.option("--shard", metavar="I/N", help="With --etcd: stand for range I (from 0) of N ranges of keys.")
@click.option("--advertise", metavar="HOST:PORT", help="With --etcd: where others reach this process.")
@with_options(SERVER_OPTIONS)
def command(
    etcd: str | None,
    shard: str | None,
    metrics: str,
    config_file: str | None,
    sets: tuple[str, ...],
    **named: str | None,
) -> int:
    """Run a directory of the store: it knows which node holds which value.

    It keeps nothing on disk: a new one learns everything from the nodes within seconds. With --etcd several stand for
    the same shard: one leads, another takes over within seconds of its end. Ctrl-C stops it.
    """
    number, shards = _shard(shard)
    if etcd is not None and "://" not in etcd:
        etcd = f"etcd://{etcd}"
    settings = store_settings(_FLAGS, config_file, sets, etcd=etcd, shard=number, shards=shards, **named)
    if settings.directory.listen == DirectoryConfig().listen and named["listen"] is None:
        # The default is for `up`, which puts a socket in its run folder; here others must find it.
        settings = replace(settings, directory=replace(settings.directory, listen=LISTEN))
    from anabranch.cluster.live.store_process import start_directory

    return serve("directory", settings.log, lambda: start_directory(settings, metrics=metrics))


def _shard(text: str | None) -> tuple[str | None, str | None]:
    if text is None:
        return None, None
    number, slash, shards = text.partition("/")
    if not slash or not number.isdecimal() or not shards.isdecimal():
        raise InvalidInput(f"--shard {text}: expected I/N, e.g. 0/2 for the first of two")
    return number, shards
