"""Sends hostile frames to a running node or directory and sees what becomes of it.

**Covers** connections, introductions (right, wrong, none), bursts, what comes back, the target's memory.
**See also** `testing.frames` and `testing.store_frames` for what is sent, `benchmarks/fuzz_store.py` for a campaign.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from anabranch.core.live.link import parse_address
from anabranch.core.messages import Message
from anabranch.testing.frames import Frame, Mutator

BURST = 60
WAIT_S = 5.0
RECEIVE_BYTES = 1 << 20
SLOW = 0.01
STALLED = 30
LATE_S = 70.0
"""A node waits up to a minute for room if it is asked to, whatever the connection does meanwhile."""
Introduce = Callable[[socket.socket, random.Random], str]
Trailer = Callable[[Message, random.Random], bytes]


class FuzzReport(msgspec.Struct, kw_only=True):
    """`frames` by what was done to them; `answered` bytes came back; `leaked`: places where `secret` bytes were among
    them; `hung`: connections that neither closed nor answered; `refused`: that could not be opened."""

    frames: Counter[str] = msgspec.field(default_factory=Counter)
    introductions: Counter[str] = msgspec.field(default_factory=Counter)
    connections: int = 0
    answered: int = 0
    leaked: list[str] = []
    hung: int = 0
    refused: int = 0

    @property
    def total(self) -> int:
        return sum(self.frames.values())


class Attacker:
    """One source of bursts. `introduce` plays the first words on a new connection and says how they went; `trailer`
    gives the raw bytes behind a valid message; `secret` must never come back."""

    def __init__(
        self,
        address: str,
        mutator: Mutator,
        pick: random.Random,
        report: FuzzReport,
        *,
        introduce: Introduce,
        trailer: Trailer = lambda message, pick: b"",
        secret: bytes = b"",
    ) -> None:
        self._family, self._where = parse_address(address)
        self._mutator = mutator
        self._pick = pick
        self._report = report
        self._introduce = introduce
        self._trailer = trailer
        self._secret = secret
        self._stalled: list[socket.socket] = []
        self._late: list[tuple[float, socket.socket]] = []

    def burst(self) -> None:
        """One connection's worth of frames."""
        report = self._report
        frames = self._frames()
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.settimeout(WAIT_S)
            try:
                sock.connect(self._where)
            except OSError:
                report.refused += 1
                return
            report.connections += 1
            with contextlib.suppress(OSError):
                report.introductions[self._introduce(sock, self._pick)] += 1
                self._exchange(sock, frames)
        finally:
            sock.close()
        report.frames.update(frame.kind for frame in frames)

    def _frames(self) -> list[Frame]:
        """Up to BURST frames; the first that ends the connection is the last."""
        frames: list[Frame] = []
        for _ in range(self._pick.randint(1, BURST)):
            frame = self._mutator.next()
            frames.append(frame)
            if frame.ends:
                break
        return frames

    def _exchange(self, sock: socket.socket, frames: list[Frame]) -> None:
        """Send everything, say that it is everything, read until the other side closes."""
        kinds = [frame.kind for frame in frames]
        for frame in frames:
            sock.sendall(frame.data if frame.message is None else frame.data + self._trailer(frame.message, self._pick))
            # Who sends without reading is stopped by the other side's full buffers, not by what it sent.
            while select.select([sock], [], [], 0)[0] and (data := sock.recv(RECEIVE_BYTES)):
                self._look(data, kinds)
        if self._pick.random() < SLOW:
            self._stall(sock)
            return
        sock.shutdown(socket.SHUT_WR)
        try:
            while data := sock.recv(RECEIVE_BYTES):
                self._look(data, kinds)
        except TimeoutError:
            self._late.append((time.monotonic() + LATE_S, sock.dup()))

    def _look(self, data: bytes, kinds: list[str]) -> None:
        self._report.answered += len(data)
        if self._secret and self._secret in data:
            self._report.leaked.append(f"{data[:64]!r} after {kinds}")

    def _stall(self, sock: socket.socket) -> None:
        """Stay, silent in the middle of whatever was said last."""
        self._stalled.append(sock.dup())
        if len(self._stalled) > STALLED:
            self._stalled.pop(0).close()

    def close(self) -> None:
        """Waits for the connections that were not closed yet; those that do not end are `hung`."""
        for sock in self._stalled:
            sock.close()
        for end, sock in self._late:
            with sock, contextlib.suppress(ConnectionError):
                sock.settimeout(max(0.1, end - time.monotonic()))
                try:
                    while data := sock.recv(RECEIVE_BYTES):
                        self._look(data, ["late"])
                except TimeoutError:
                    self._report.hung += 1
        self._late.clear()


def resident_bytes(pid: int) -> int:
    """Anonymous memory of a process: an arena that fills up is not growth."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0
