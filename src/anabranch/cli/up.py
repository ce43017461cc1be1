"""`anabranch up`."""

from __future__ import annotations

import threading
import time

import click

from anabranch.cli.settings import effective, with_settings
from anabranch.cli.stop_signals import stop_signals
from anabranch.cluster.settings import Settings, settings_of
from anabranch.core.config import refuse


@click.command(
    epilog="Example: `anabranch up --prefill 2 --decode 1 --port 8080`, then `anabranch chat` in another terminal."
)
@with_settings
@click.option("--verbose", "-v", is_flag=True, help="Stream the logs of all processes.")
def command(verbose: bool, **options: object) -> int:
    """Serve a model: start directory, nodes, engines and gateway on this machine and supervise them.

    A process that dies is restarted. Ctrl-C drains running requests and stops everything; a second Ctrl-C kills.
    """
    resolved = effective(**options)  # type: ignore[arg-type]  # click delivers what `with_settings` declares
    refuse(resolved.problems)
    return _serve(settings_of(resolved), verbose)


def _serve(settings: Settings, verbose: bool) -> int:
    from anabranch.cli.run_output import LogFollower, StartDisplay, announce, lasting_console
    from anabranch.cluster.live.cluster import LocalCluster
    from anabranch.cluster.live.entry import served_name
    from anabranch.cluster.local import LOG_FOLDER

    console = lasting_console()
    display = StartDisplay(console)
    started = threading.Event()

    def event(process: str, message: str) -> None:
        console.print(f"{process} {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)

    def progress(stage: str, fraction: float) -> None:
        if stop.requested.is_set():
            raise KeyboardInterrupt
        display.preparing(stage, fraction)

    cluster = LocalCluster(
        settings,
        progress=progress,
        on_change=lambda statuses: None if started.is_set() else display.changed(statuses),
        on_event=event,
    )
    began = time.monotonic()
    follower: LogFollower | None = None
    with stop_signals(cluster.kill_all) as stop:
        try:
            if verbose:
                follower = LogFollower(console, cluster.folder.path / LOG_FOLDER)
            cluster.start(cancelled=stop.requested)
            started.set()
            display.close()
            if not stop.requested.is_set():
                announce(console, cluster.spec, cluster.url, served_name(cluster.spec), time.monotonic() - began)
            cluster.wait(stop.requested)
            console.print("stopping …", highlight=False)
        finally:
            started.set()
            display.close()
            cluster.stop()
            if follower is not None:
                follower.close()
    return stop.exit_code
