"""Proving who calls on a fresh, blocking socket, before a `Link` takes it over. Both sides.

**Covers** links to the directory. **Does not cover** lanes to nodes: their messages carry the proof themselves
(`store.values.introduction`).

    client   link_socket = Dialer(credentials, tls)(address)
    server   Listener(address, Gate(access, on_caller))

An open server (no secret, no TLS) sends nothing and trusts everybody, so processes without settings need none of this.
"""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from anabranch.core.authentication import (
    NONCE_BYTES,
    Access,
    Caller,
    Credentials,
    Denial,
    answer,
    confirms,
    hello_proof,
)
from anabranch.core.errors import AccessDenied, AnabranchError, Unavailable, WireError
from anabranch.core.handshake import Accepted, Challenge, Introduction, Rejected
from anabranch.core.live.link import connect
from anabranch.core.live.seldom import Seldom
from anabranch.core.live.strangers import MOST, Strangers
from anabranch.core.live.tls import Tls, TlsSocket, certificate_name
from anabranch.core.wire import HEADER, encode

TIMEOUT_S = 5.0
MAX_FRAME_BYTES = 4096
LOG_EVERY_S = 60.0
"""How often a host that is not let in is logged; all are counted."""
log = logging.getLogger(__name__)
M = TypeVar("M")


def client_handshake(sock: socket.socket, credentials: Credentials, *, timeout_s: float = TIMEOUT_S) -> None:
    """Prove that we have the secret, and that the server has it. Nothing is sent if there is none (and no TLS).

    Raises AccessDenied, or Unavailable if the server closes or stays silent. The socket is closed on any error.
    """
    if not credentials.secret and not isinstance(sock, TlsSocket):
        return
    with _bounded(sock, timeout_s, "the server asks for no proof: it has no security.secret_file, or is too busy"):
        challenge = _receive(sock, Challenge)
        session, nonce = secrets.token_bytes(NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
        who = (credentials.tenant, credentials.namespace, credentials.epoch)
        proof = b""
        if credentials.secret:
            proof = hello_proof(credentials.secret, challenge.nonce, nonce, session, *who)
        sent = Introduction(session=session, nonce=nonce, tenant=who[0], namespace=who[1], epoch=who[2], proof=proof)
        sock.sendall(encode(sent))
        reply: Accepted | Rejected = _receive(sock, Accepted | Rejected)
        if isinstance(reply, Rejected):
            raise AccessDenied(reply.reason)
        # A certificate that opened the door proved the server as well: TLS checked its side.
        proven = not credentials.secret or confirms(credentials.secret, challenge.nonce, sent, reply.proof)
        if not proven and not isinstance(sock, TlsSocket):
            raise AccessDenied("the server does not know this client's secret")


def server_handshake(sock: socket.socket, access: Access, *, timeout_s: float = TIMEOUT_S) -> Caller:
    """Who is calling. Blocks up to `timeout_s`: never on an accept thread (`Gate` has threads).

    Raises AccessDenied after telling the caller why, Unavailable or WireError if it says nothing or nonsense. The
    socket is closed on any error.
    """
    if not access.authenticates:
        return Caller(tenant="", trusted=True, salt=b"")
    nonce = secrets.token_bytes(NONCE_BYTES)
    with _bounded(sock, timeout_s, "the caller did not answer the challenge"):
        sock.sendall(encode(Challenge(nonce=nonce)))
        try:
            claim = _receive(sock, Introduction)
        except WireError:
            reason = "a secret is needed here: set security.secret_file"
            sock.sendall(encode(Rejected(reason=reason)))
            raise
        caller = access.check(claim, nonce, certificate_name(sock))
        if isinstance(caller, Denial):
            sock.sendall(encode(Rejected(reason=caller.reason, code=caller.code)))
            raise AccessDenied(caller.reason)
        sock.sendall(encode(Accepted(proof=answer(caller, nonce, claim))))
    return caller


class Dialer:
    """Connects like `core.live.link.connect`, with TLS and proof where there are such; UNIX sockets need no TLS."""

    def __init__(self, credentials: Credentials | None = None, tls: Tls | None = None) -> None:
        self._credentials = credentials or Credentials()
        self._tls = tls

    def __call__(self, address: str, *, timeout_s: float = 2.0) -> socket.socket:
        """Raises Unavailable, or AccessDenied if one side does not accept the other."""
        sock = connect(address, timeout_s=timeout_s)
        if self._tls is not None and sock.family != socket.AF_UNIX:
            sock = self._tls.wrap_client(sock, timeout_s=timeout_s)
        client_handshake(sock, self._credentials, timeout_s=timeout_s)
        return sock


OPEN_DIALER = Dialer()


class Gate:
    """For `Listener`: hands over sockets (TLS on, if configured and not a UNIX socket) whose callers were let in.
    `on_caller` runs on the accept thread of an open server, else on a thread of the caller's own."""

    def __init__(
        self,
        access: Access,
        on_caller: Callable[[socket.socket, Caller], None],
        *,
        tls: Tls | None = None,
        timeout_s: float = TIMEOUT_S,
        most: int = MOST,
    ) -> None:
        self._access = access
        self._on_caller = on_caller
        self._tls = tls
        self._timeout_s = timeout_s
        self._strangers = Strangers(most)
        self._seldom = Seldom(LOG_EVERY_S)
        self.denied = 0
        """Callers that were not let in, about."""

    def __call__(self, sock: socket.socket) -> None:
        if not self._access.authenticates and self._tls is None:
            self._on_caller(sock, server_handshake(sock, self._access))
        elif self._strangers.add(sock):
            threading.Thread(target=self._admit, args=(sock,), name="gate", daemon=True).start()
        else:
            sock.close()

    def close(self) -> None:
        """Nobody is let in any more; callers in the middle of it are disconnected."""
        self._strangers.close()

    def _admit(self, raw: socket.socket) -> None:
        peer, sock = peer_of(raw), raw
        try:
            if self._tls is not None and raw.family != socket.AF_UNIX:
                sock = self._tls.wrap_server(raw, timeout_s=self._timeout_s)
                self._strangers.replace(raw, sock)
            caller = server_handshake(sock, self._access, timeout_s=self._timeout_s)
        except AnabranchError as error:
            self.denied += 1
            if self._seldom.due((peer.rpartition(":")[0], error.code)):
                log.warning("caller not let in", extra={"peer": peer, "reason": str(error), "code": error.code})
            return
        finally:
            self._strangers.remove(raw)
            self._strangers.remove(sock)
        self._on_caller(sock, caller)


class _bounded:  # noqa: N801  # reads as the statement that it is
    """Within: every wait on the socket has a bound, an OSError is Unavailable, and any error closes the socket."""

    def __init__(self, sock: socket.socket, timeout_s: float, silence: str) -> None:
        self._sock, self._timeout_s, self._silence = sock, timeout_s, silence

    def __enter__(self) -> None:
        self._sock.settimeout(self._timeout_s)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._sock.settimeout(None)
            return
        self._sock.close()
        if isinstance(error, TimeoutError):
            raise Unavailable(f"{self._silence} (waited {self._timeout_s:g} s)") from error
        if isinstance(error, ssl.SSLError):
            raise AccessDenied(f"the other side refused this side's certificate: {error.reason}") from error
        if isinstance(error, OSError):
            raise Unavailable(f"the connection broke while the two sides proved themselves: {error}") from error


def _receive(sock: socket.socket, kind: Any) -> Any:
    """One frame and not a byte more."""
    (length,) = HEADER.unpack(_exactly(sock, HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes where a proof was expected")
    try:
        return msgspec.msgpack.decode(_exactly(sock, length), type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"not the message that was expected: {error}") from error


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise Unavailable("the other side closed while the two proved themselves")
        data += part
    return data


def peer_of(sock: socket.socket) -> str:
    """For logs: who is at the other end."""
    try:
        where = sock.getpeername()
    except OSError:
        return "gone"
    return f"{where[0]}:{where[1]}" if isinstance(where, tuple) else "unix"
