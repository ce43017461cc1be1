"""Who this client is to every node: the introduction on each lane, and what a node says of itself."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

from anabranch.core.authentication import NONCE_BYTES, Credentials
from anabranch.core.errors import AccessDenied, WireError
from anabranch.core.live.tls import Tls
from anabranch.store.values.introduction import admitted, hello
from anabranch.store.values.live.lane import Lane, refusal
from anabranch.store.values.messages import Denied, Greeting, Welcome

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Session:
    """One client's identity: `session` is equal on all its lanes, so what is granted on one can be used on another."""

    def __init__(self, credentials: Credentials, *, tls: Tls | None = None, name: str = "") -> None:
        self.credentials = credentials
        self.tls = tls
        self.name = name or f"pid-{os.getpid()}"
        self.id = secrets.token_bytes(NONCE_BYTES)
        self.boot = boot_id()

    def open(self, address: str, timeout_s: float, deadline: float | None = None) -> tuple[Lane, Welcome]:
        """A lane on which the node has let us in, by the deadline (else within `timeout_s`).
        Raises Unavailable, DeadlineExceeded, WireError, AccessDenied."""
        lane = Lane.dial(address, timeout_s=timeout_s, tls=self.tls)
        try:
            lane.until(time.monotonic() + timeout_s if deadline is None else deadline, timeout_s)
            greeting = lane.receive()
            if isinstance(greeting, Denied):
                raise refusal(address, greeting)
            if not isinstance(greeting, Greeting):
                raise WireError(f"{address} is not a store node: it does not greet")
            sent = hello(self.credentials, greeting, self.id, secrets.token_bytes(NONCE_BYTES), name=self.name)
            lane.send(sent)
            reply = lane.receive()
            if isinstance(reply, Denied) and reply.code != AccessDenied.code:
                raise refusal(address, reply)
            if not isinstance(reply, Welcome | Denied):
                raise WireError(f"{address} answers a hello with {type(reply).__name__}")
            return lane, admitted(self.credentials, greeting, sent, reply)
        except BaseException:
            lane.close()
            raise

    def same_host(self, welcome: Welcome) -> bool:
        """The node runs on this host and lets us see its memory."""
        return welcome.trusted and bool(welcome.boot) and welcome.boot == self.boot


def boot_id() -> str:
    """Equal in all processes of one boot of one host; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
