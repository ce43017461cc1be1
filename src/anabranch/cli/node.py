"""`anabranch node`."""

from __future__ import annotations

import sys

import click

from anabranch.cli.serving_process import serve
from anabranch.cli.store_settings import SERVER_FLAGS, SERVER_OPTIONS, store_settings, with_options

_FLAGS = {
    "listen": ("store", "listen"),
    "advertise": ("store", "advertise"),
    "directory": ("store", "directory"),
    "dram": ("store", "dram_bytes"),
    "ssd": ("store", "ssd_bytes"),
    "ssd_dir": ("store", "ssd_dir"),
    "backing": ("store", "backing"),
    "replicas": ("write", "replicas"),
    **SERVER_FLAGS,
}


@click.command(
    epilog="Example: `anabranch node --listen 127.0.0.1:7070 --directory 127.0.0.1:7060 --dram 4GiB`; without a "
    "directory the node is a store of its own. `anabranch.Client('127.0.0.1:7070')` uses it."
)
@click.option("--listen", metavar="HOST:PORT", help="Where clients and nodes connect.  [default: 127.0.0.1:7070]")
@click.option("--advertise", metavar="HOST:PORT", help="Where others reach it, if not there.")
@click.option("--directory", metavar="ADDRESS", help="Directory: host:port, shards comma-separated, or etcd://…")
@click.option("--dram", metavar="SIZE", help="Arena, in shared memory.  [default: 1GiB]")
@click.option("--ssd", metavar="SIZE", help="SSD tier.  [default: none]")
@click.option("--ssd-dir", metavar="FOLDER", help="Where the SSD tier is.  [default: in the data folder]")
@click.option("--backing", metavar="PLACE", help="Shared tier: a folder, or s3://bucket/prefix.")
@click.option("--replicas", metavar="N", help="Nodes that hold each value.  [default: 1]")
@click.option("--name", default="", metavar="NAME", help="The node's name in its store.  [default: HOST-PORT]")
@click.option("--data-dir", default="", metavar="FOLDER", help="What outlives the node.  [default: in ~/.cache]")
@click.option("--keep", is_flag=True, help="Stopped, leave what is in memory to a successor (an upgrade).")
@with_options(SERVER_OPTIONS)
def command(
    name: str, data_dir: str, keep: bool, metrics: str, config_file: str | None, sets: tuple[str, ...], **named: object
) -> int:
    """Run a node of the store: it keeps values in memory and on disk, and serves them.

    Restarted with the same name and data folder it has what it had, in memory too if only the process had ended.
    Ctrl-C stops it; `anabranch store drain` first hands over what it holds.
    """
    # A lane that works through a large batch lets the others go on after 0.5 ms, not 5.
    sys.setswitchinterval(0.0005)
    settings = store_settings(_FLAGS, config_file, sets, **named)
    from anabranch.cluster.live.store_process import node_name, start_node

    name = name or node_name(settings.store.listen)
    return serve(name, settings.log, lambda: start_node(settings, name, data_dir=data_dir, metrics=metrics, keep=keep))
