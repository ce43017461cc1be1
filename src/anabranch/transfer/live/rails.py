"""Connections over chosen NICs: which rails lead to a peer, which of them gets the next connection, which has failed.

**Covers** binding, marks, time limits of a connection, leaving and probing a rail. **Does not cover** what is said on a
connection. A peer with several NICs is written `host:port+host:port`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from anabranch.core.errors import ConfigError, Unavailable
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.marks import mark
from anabranch.transfer.live.shaper import LinkShaper
from anabranch.transfer.spread import Spread
from anabranch.transfer.topology import Nic, Topology, Use, host_of, parse_topology, split_addresses

CONNECT_S = 2.0
SILENCE_S = 1.5
"""How long a peer may be silent on one of several rails, in the kernel's eyes, before another is taken."""
Permit = Callable[[int, float], None]
"""Waits until so many bytes may be sent, at most so many seconds. Raises DeadlineExceeded."""


class Rail(msgspec.Struct, frozen=True):
    """A way to a peer: a NIC here, one of its addresses there (`host:port` or `unix:/path`)."""

    nic: Nic
    address: str

    def __str__(self) -> str:
        return f"{self.address} over {self.nic.name}" if self.nic.name else self.address


def load_topology(path: str) -> Topology:
    """The file's topology; one unnamed NIC for an empty path. Raises ConfigError."""
    if not path:
        return Topology()
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the topology {path}: {error}") from error
    return parse_topology(text, path)


def connect_rail(
    rail: Rail,
    traffic: TrafficClass,
    *,
    timeout_s: float = CONNECT_S,
    silence_s: float = 0.0,
    marks: bool = False,
) -> socket.socket:
    """A connected, blocking socket that leaves through the rail's NIC. A peer whose kernel is not heard of for
    `silence_s` (a cut cable, a dead host; 0: no limit) ends the connection with an error, also while nothing is sent.
    Raises Unavailable."""
    unix = rail.address.startswith("unix:")
    try:
        family, where = _resolve(rail.address)
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"cannot connect to {rail}: {error}") from error
    try:
        sock.settimeout(timeout_s)
        if not unix:
            _prepare(sock, rail.nic, silence_s)
            if marks:
                mark(sock, traffic)
        sock.connect(where)
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise Unavailable(f"cannot connect to {rail}: {error}") from error
    return sock


def _resolve(address: str) -> tuple[socket.AddressFamily, Any]:
    if address.startswith("unix:"):
        return socket.AF_UNIX, address[5:]
    host, port = host_of(address), address.rpartition(":")[2]
    if not host or not port.isdigit():
        raise OSError(f"{address!r} is not host:port")
    found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


def _prepare(sock: socket.socket, nic: Nic, silence_s: float) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if silence_s:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(silence_s / 3)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(silence_s / 3)))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence_s * 1000))
    if nic.device:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, nic.device.encode())
    if nic.address:
        sock.bind((nic.address, 0))


class RailSet:
    """The rails to one peer. Thread-safe. Use: `connect` for each connection wanted, then exactly one of `closed` and
    `failed` for it. Only where there are several does a silent peer end a connection (after `silence_s`): one rail is
    left for another, never for nothing."""

    def __init__(
        self,
        rails: tuple[Rail, ...],
        *,
        marks: bool = False,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rails = rails
        self._marks, self._clock = marks, clock
        self._silence_s = silence_s if len(rails) > 1 else 0.0
        self._lock = threading.Lock()
        self._spread = Spread({rail: rail.nic.bandwidth for rail in rails})
        self._lanes: Counter[Rail] = Counter()

    def connect(
        self, traffic: TrafficClass, *, timeout_s: float = CONNECT_S, only: Rail | None = None
    ) -> tuple[Rail, socket.socket]:
        """A connection over the rail whose bandwidth is shared by the fewest connections; if that fails, over the next
        one, `timeout_s` for each. Rails that have failed come last. `only`: over this one. Raises Unavailable."""
        reasons = []
        for rail in (only,) if only is not None else self._candidates():
            with self._lock:
                self._spread.take(rail, 0, self._clock())
                self._lanes[rail] += 1
            try:
                sock = connect_rail(rail, traffic, timeout_s=timeout_s, silence_s=self._silence_s, marks=self._marks)
            except Unavailable as error:
                self.failed(rail)
                reasons.append(str(error))
                continue
            with self._lock:
                self._spread.back(rail, self._clock())
            return rail, sock
        raise Unavailable("; ".join(reasons))

    def closed(self, rail: Rail) -> None:
        """A connection was closed here."""
        with self._lock:
            self._lanes[rail] -= 1

    def failed(self, rail: Rail) -> None:
        """A connection broke or stayed silent: the rail is left for a while."""
        with self._lock:
            self._lanes[rail] -= 1
            self._spread.failed(rail, self._clock())

    def in_use(self) -> list[Rail]:
        with self._lock:
            return self._spread.in_use()

    def lanes(self, rail: Rail) -> int:
        """Connections open over the rail."""
        return self._lanes[rail]

    def missing(self) -> Rail | None:
        """A rail that may be tried now and has no connection: never used yet, or failed and due for a probe."""
        if len(self.rails) == 1:
            return None
        with self._lock:
            usable = self._spread.in_use() + self._spread.due(self._clock())
            return next((rail for rail in usable if self._lanes[rail] <= 0), None)

    def _candidates(self) -> list[Rail]:
        with self._lock:
            now = self._clock()
            in_use = self._spread.in_use()
            in_use.sort(key=lambda rail: (self._lanes[rail] + 1) * self._spread.cost(rail, now))
            return in_use + [rail for rail in self.rails if rail not in in_use]


class Links:
    """This process's NICs: one shaper for each, and rails to any peer. `rate_bytes`: of each NIC whose topology entry
    has no rate of its own."""

    def __init__(
        self,
        topology: Topology | None = None,
        *,
        rate_bytes: int = 0,
        marks: bool = False,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.topology = topology or Topology()
        self.marks = marks
        self._silence_s = silence_s
        self._shapers = {nic.name: LinkShaper(nic.rate_bytes or rate_bytes) for nic in self.topology.nics}

    def shaper(self, nic: Nic) -> LinkShaper:
        return self._shapers[nic.name]

    def permit(self, nic: Nic | None, traffic: TrafficClass) -> Permit | None:
        """What a sender asks before each message; None: it need not ask."""
        shaper = self._shapers.get(nic.name) if nic is not None else None
        if shaper is None or not shaper.rate_bytes:
            return None
        return partial(shaper.send, traffic)

    def accepted(self, sock: socket.socket, traffic: TrafficClass) -> Permit | None:
        """`permit` for a connection that a peer has made; marked if this process marks its packets."""
        if self.marks:
            mark(sock, traffic)
        return self.permit(self.nic_of(sock), traffic)

    def nic_of(self, sock: socket.socket) -> Nic | None:
        """Through which NIC an accepted connection came; None: through none of the topology's, e.g. a UNIX socket."""
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        host = str(sock.getsockname()[0]).removeprefix("::ffff:")
        named = next((nic for nic in self.topology.nics if nic.address == host), None)
        unnamed = next((nic for nic in self.topology.nics if not nic.address), None)
        return named or unnamed

    def rails(self, address: str, use: Use = "any") -> RailSet:
        """Every pair of a NIC here and an address of the peer that it reaches. Raises Unavailable if there is none."""
        rails, problems = [], []
        for part in split_addresses(address):
            if part.startswith("unix:"):
                rails.append(Rail(Nic(), part))
                continue
            try:
                rails += [Rail(nic, part) for nic in self.topology.towards(host_of(part), use)]
            except ConfigError as error:
                problems.append(str(error))
        if not rails:
            raise Unavailable(problems[0] if problems else f"{address!r} is not an address")
        return RailSet(tuple(rails), marks=self.marks, silence_s=self._silence_s)
