"""Who this client is to every node: the introduction on each lane, and what a node says of itself."""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

from anabranch.core.authentication import NONCE_BYTES, Credentials
from anabranch.core.errors import AccessDenied, DeadlineExceeded, WireError
from anabranch.core.handshake import Challenge
from anabranch.core.live.tls import Tls
from anabranch.store.values.introduction import admitted, hello
from anabranch.store.values.live.lane import Lane, refusal
from anabranch.store.values.messages import Denied, Greeting, Welcome
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.rails import Links, Rail, RailSet

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

BULK_PATIENCE_S = 10.0
"""Least patience of classes below load: on a shaped link a node keeps them waiting for good reason."""


class Session:
    """One client's identity: `session` is equal on all its lanes, so what is granted on one can be used on another.
    `links`: the host's NICs; `traffic`: the class of everything that this client moves."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        tls: Tls | None = None,
        name: str = "",
        links: Links | None = None,
        traffic: TrafficClass = TrafficClass.LOAD,
    ) -> None:
        self.credentials = credentials
        self.tls = tls
        self.links = links or Links()
        self.traffic = traffic
        self.name = name or f"pid-{os.getpid()}"
        self.id = secrets.token_bytes(NONCE_BYTES)
        self.boot = boot_id()

    def open(
        self,
        address: str,
        timeout_s: float,
        deadline: float | None = None,
        *,
        over: RailSet | None = None,
        only: Rail | None = None,
    ) -> tuple[Lane, Welcome]:
        """A lane on which the node has let us in, by the deadline (else within `timeout_s`). `over`: the caller's rails
        to this address, to which it reports later what becomes of the lane; `only`: over this one of them.
        Raises Unavailable, DeadlineExceeded, WireError, AccessDenied."""
        rails = over or self.links.rails(address)
        rail, sock = rails.connect(self.traffic, timeout_s=timeout_s, only=only)
        lane: Lane | None = None
        try:
            if self.tls is not None and sock.family != socket.AF_UNIX:
                sock = self.tls.wrap_client(sock, timeout_s=timeout_s)
            permit = self.links.permit(rail.nic, self.traffic) if sock.family != socket.AF_UNIX else None
            least_s = BULK_PATIENCE_S if self.traffic > TrafficClass.LOAD else 0.0
            lane = Lane(sock, rail.address, rail=rail, permit=permit, least_patience_s=least_s)
            return lane, self._introduce(lane, timeout_s, deadline)
        except BaseException:
            (lane or sock).close()
            (rails.closed if lane is None or not lane.lost else rails.failed)(rail)
            raise

    def _introduce(self, lane: Lane, timeout_s: float, deadline: float | None) -> Welcome:
        lane.until(time.monotonic() + timeout_s if deadline is None else deadline, timeout_s)
        try:
            greeting = lane.receive()
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"{lane.address} takes the connection and does not greet: the node hangs, or is a directory (give that "
                "as `directory`)"
            ) from error
        if isinstance(greeting, Challenge):
            raise WireError(f"{lane.address} is a directory and no store node: give its address as `directory`")
        if isinstance(greeting, Denied):
            raise refusal(lane.address, greeting)
        if not isinstance(greeting, Greeting):
            raise WireError(f"{lane.address} is not a store node: it does not greet")
        nonce = secrets.token_bytes(NONCE_BYTES)
        sent = hello(self.credentials, greeting, self.id, nonce, name=self.name, traffic=self.traffic)
        lane.send(sent)
        reply = lane.receive()
        if isinstance(reply, Denied) and reply.code != AccessDenied.code:
            raise refusal(lane.address, reply)
        if not isinstance(reply, Welcome | Denied):
            raise WireError(f"{lane.address} answers a hello with {type(reply).__name__}")
        return admitted(self.credentials, greeting, sent, reply)

    def same_host(self, welcome: Welcome) -> bool:
        """The node runs on this host, lets us see its memory, and says where in a way that holds here: a relative path
        would lead to whatever lies under this process's own folder."""
        local = welcome.local_address
        absolute = not local or local.removeprefix("unix:").startswith("/")
        return welcome.trusted and bool(welcome.boot) and welcome.boot == self.boot and absolute


def same_process(one: Welcome, other: Welcome) -> bool:
    """Both welcomes came from the same running node: paths of one lead to what the other serves."""
    return _identity(one) == _identity(other)


def _identity(welcome: Welcome) -> tuple[object, ...]:
    return (
        *(welcome.node_id, welcome.salt, welcome.boot, welcome.local_address),
        *(welcome.arena_path, welcome.arena_inode, welcome.index_path, welcome.index_inode),
    )


def boot_id() -> str:
    """Equal in all processes of one boot of one host; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
