"""`anabranch down`."""

from __future__ import annotations

import click

from anabranch.cli.settings import located
from anabranch.cluster.live.run_folder import default_run_dir, remove_leftovers, stop_cluster, supervisor_pid


@click.command(epilog="Example: `anabranch down --name default`.")
@click.option("--name", default=None, metavar="NAME", help="Which cluster.  [default: default]")
@click.option("--config", "config_file", metavar="FILE", help="TOML file; without it ./anabranch.toml if it exists.")
@click.option("--timeout", "timeout_s", default=90.0, metavar="SECONDS", show_default=True, help="How long to wait.")
def command(name: str | None, config_file: str | None, timeout_s: float) -> None:
    """Stop a running cluster: running requests are drained first."""
    cluster = located(config_file, name)
    run_dir = default_run_dir(cluster)
    if supervisor_pid(run_dir) is None and run_dir.exists():
        remove_leftovers(run_dir, cluster.name)
        click.echo(f"cluster '{cluster.name}' was not running; removed what it had left behind")
        return
    pid = stop_cluster(run_dir, cluster.name, timeout_s=timeout_s)
    click.echo(f"stopped cluster '{cluster.name}' (process {pid})")
