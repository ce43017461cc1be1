"""Ctrl-C and its kin: the first asks a command to stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """What the signal handlers know: whether to stop, and which signal said so."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.number = 0

    @property
    def exit_code(self) -> int:
        return 130 if self.number == signal.SIGINT else 0


@contextmanager
def stop_signals(kill: Callable[[], None]) -> Iterator[Stop]:
    """First SIGINT, SIGTERM or SIGHUP: ask to stop; second: `kill`. Main thread only."""
    stop = Stop()
    told, tell = os.pipe()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.number:
            kill()
            return
        stop.number = number
        # Not the event itself: the handler may have interrupted somebody who holds its lock, or another handler.
        os.write(tell, b"x")

    def listen() -> None:
        if os.read(told, 1):
            stop.requested.set()

    listener = threading.Thread(target=listen, name="stop-signals", daemon=True)
    listener.start()
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(tell)
        listener.join()
        os.close(told)
