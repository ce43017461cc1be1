"""What `anabranch up` prints, when nobody is there to read it."""

from __future__ import annotations

import concurrent.futures
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from anabranch.cli.run_output import StartDisplay, lasting_console
from anabranch.cluster.live.child import ChildStatus

READY = ChildStatus(name="gateway", kind="gateway", state="ready", pid=1, restarts=0, since_s=0.0)


@contextmanager
def dead_pipe() -> Iterator[TextIO]:
    reader, writer = os.pipe()
    os.close(reader)
    stream = os.fdopen(writer, "w", buffering=1)
    try:
        yield stream
    finally:
        with pytest.raises(BrokenPipeError):
            stream.close()


def speak() -> None:
    console = lasting_console()
    for _ in range(3):
        console.print("decode-0 ended; restarting")
    display = StartDisplay(console)
    display.preparing("reading", 0.5)
    display.changed([READY])
    display.close()


def on_another_thread(stream: TextIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervising thread speaks too; what ends it ends the cluster. Raises what `speak` raises."""
    with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(1) as pool:
        patch.setattr(sys, "stderr", stream)
        pool.submit(speak).result()


def test_a_pipe_whose_reader_ended_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    with dead_pipe() as stream:
        on_another_thread(stream, monkeypatch)


def test_a_full_disk_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", buffering=1)
    on_another_thread(stream, monkeypatch)
    with pytest.raises(OSError, match="No space"):
        stream.close()


def test_no_standard_error_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    on_another_thread(None, monkeypatch)
