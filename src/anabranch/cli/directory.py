"""`anabranch directory`."""

from __future__ import annotations

import click
from msgspec.structs import replace

from anabranch.cli.serving_process import serve
from anabranch.cli.store_settings import CONFIG_OPTIONS, SECURITY_FLAGS, SECURITY_OPTIONS, store_settings, with_options
from anabranch.store.config import DirectoryConfig

LISTEN = "127.0.0.1:7060"


@click.command(
    epilog="Example: `anabranch directory --listen 127.0.0.1:7060`, then "
    "`anabranch node --directory 127.0.0.1:7060` in another terminal."
)
@click.option("--listen", metavar="HOST:PORT", help=f"Where nodes and clients connect.  [default: {LISTEN}]")
@click.option("--metrics", default="", metavar="HOST:PORT", help="Serve /metrics and /healthz here.")
@with_options(SECURITY_OPTIONS)
@with_options(CONFIG_OPTIONS)
def command(
    listen: str | None, metrics: str, config_file: str | None, sets: tuple[str, ...], **security: object
) -> int:
    """Run a directory of the store: it knows which node holds which value.

    It keeps nothing on disk: a new one learns everything from the nodes within seconds. Ctrl-C stops it.
    """
    settings = store_settings(
        {"listen": ("directory", "listen"), **SECURITY_FLAGS}, config_file, sets, listen=listen, **security
    )
    if settings.directory.listen == DirectoryConfig().listen and listen is None:
        # The default is for `up`, which puts a socket in its run folder; here others must find it.
        settings = replace(settings, directory=replace(settings.directory, listen=LISTEN))
    from anabranch.cluster.live.store_process import start_directory

    return serve("directory", settings.log, lambda: start_directory(settings, metrics=metrics))
