"""`anabranch node`."""

from __future__ import annotations

import click

from anabranch.cli.serving_process import serve
from anabranch.cli.store_settings import CONFIG_OPTIONS, SECURITY_FLAGS, SECURITY_OPTIONS, store_settings, with_options

_FLAGS = {
    "listen": ("store", "listen"),
    "directory": ("store", "directory"),
    "dram": ("store", "dram_bytes"),
    "ssd": ("store", "ssd_bytes"),
    "ssd_dir": ("store", "ssd_dir"),
    "backing": ("store", "backing"),
    "replicas": ("write", "replicas"),
    "tenants_file": ("security", "tenants_file"),
    **SECURITY_FLAGS,
}


@click.command(
    epilog="Example: `anabranch node --listen 127.0.0.1:7070 --directory 127.0.0.1:7060 --dram 4GiB`; without a "
    "directory the node is a store of its own. `anabranch.Client('127.0.0.1:7070')` uses it."
)
@click.option("--listen", metavar="HOST:PORT", help="Where clients and nodes connect.  [default: 127.0.0.1:7070]")
@click.option("--directory", metavar="ADDRESS", help="Directory: host:port, shards comma-separated, or etcd://…")
@click.option("--dram", metavar="SIZE", help="Arena, in shared memory.  [default: 1GiB]")
@click.option("--ssd", metavar="SIZE", help="SSD tier.  [default: none]")
@click.option("--ssd-dir", metavar="FOLDER", help="Where the SSD tier is.  [default: in the data folder]")
@click.option("--backing", metavar="PLACE", help="Shared tier: a folder, or s3://bucket/prefix.")
@click.option("--replicas", metavar="N", help="Nodes that hold each value.  [default: 1]")
@click.option("--tenants-file", metavar="FILE", help="Tenants: TOML with secret, quota_bytes, encrypt for each.")
@click.option("--name", default="", metavar="NAME", help="The node's name in its store.  [default: HOST-PORT]")
@click.option("--data-dir", default="", metavar="FOLDER", help="What outlives the node.  [default: in ~/.cache]")
@click.option("--keep", is_flag=True, help="Stopped, leave what is in memory to a successor (an upgrade).")
@click.option("--metrics", default="", metavar="HOST:PORT", help="Serve /metrics and /healthz here.")
@with_options(SECURITY_OPTIONS)
@with_options(CONFIG_OPTIONS)
def command(
    name: str, data_dir: str, keep: bool, metrics: str, config_file: str | None, sets: tuple[str, ...], **named: object
) -> int:
    """Run a node of the store: it keeps values in memory and on disk, and serves them.

    Restarted with the same name and data folder it has what it had, in memory too if only the process had ended.
    Ctrl-C stops it; `anabranch store drain` first hands over what it holds.
    """
    settings = store_settings(_FLAGS, config_file, sets, **named)
    from anabranch.cluster.live.store_process import node_name, start_node

    name = name or node_name(settings.store.listen)
    return serve(name, settings.log, lambda: start_node(settings, name, data_dir=data_dir, metrics=metrics, keep=keep))
