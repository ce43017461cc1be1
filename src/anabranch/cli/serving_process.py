"""A process of the store at the command line: one ready line, then until a signal."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

import click

from anabranch.cli.stop_signals import stop_signals
from anabranch.core.config import LogConfig
from anabranch.core.live.logging import configure
from anabranch.core.live.process import tell_service_manager

LOOK_S = 0.25


class Process(Protocol):
    @property
    def address(self) -> str: ...
    @property
    def metrics_address(self) -> str: ...
    @property
    def ended(self) -> bool: ...
    def stop(self) -> None: ...


def serve(name: str, log: LogConfig, start: Callable[[], Process]) -> int:
    """Start, say where on stdout, wait for SIGINT or SIGTERM (or until it has left by itself: drained), stop. A second
    signal ends the process at once."""
    configure(log, name)
    # What the process writes (sockets, arenas, files) is its owner's alone.
    os.umask(0o077)
    with stop_signals(lambda: os._exit(130)) as stop:
        process = start()
        try:
            metrics = f" (metrics at http://{process.metrics_address}/metrics)" if process.metrics_address else ""
            click.echo(f"{name} ready at {process.address}{metrics}")
            tell_service_manager("READY=1", os.environ)
            while not stop.requested.wait(LOOK_S) and not process.ended:
                pass
            tell_service_manager("STOPPING=1", os.environ)
        finally:
            process.stop()
    return stop.exit_code
