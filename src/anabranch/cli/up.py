"""`anabranch up`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import click

from anabranch.cli.settings import effective, with_settings
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
    with _signals(cluster.kill_all) as stop:
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
    return 130 if stop.number == signal.SIGINT else 0


class _Stop:
    """What the signal handlers know: whether to stop, and which signal said so."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.number = 0


@contextmanager
def _signals(kill: Callable[[], None]) -> Iterator[_Stop]:
    """First SIGINT, SIGTERM or SIGHUP: ask to stop; second: kill."""
    stop = _Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested.is_set():
            kill()
        stop.number = stop.number or number
        stop.requested.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
