"""Mutual TLS for blocking sockets: both sides show a certificate of one private authority.

**Covers** contexts, the socket, the name in a certificate. **Does not cover** what a name allows
(`core.authentication.Access`).

A certificate's name is its common name or URI: `node:NAME` for nodes and directories (and administrators),
`tenant:NAME` for clients. A client accepts any server that is a node of the authority: host names and addresses are
not compared, as nodes change theirs.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from anabranch.core.authentication import NODE_PREFIX, TENANT_PREFIX
from anabranch.core.errors import AccessDenied, ConfigError, Unavailable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

RECEIVE_BYTES = 1 << 18
SEND_BYTES = 1 << 18
HANDSHAKE_S = 5.0


class Tls:
    """This process's certificate and the authority that it trusts. Raises ConfigError naming the setting."""

    def __init__(self, cert: str, key: str, ca: str) -> None:
        if missing := [name for name, path in (("cert", cert), ("key", key), ("ca", ca)) if not path]:
            raise ConfigError(f"TLS needs all of security.tls_cert, tls_key and tls_ca; missing: tls_{missing[0]}")
        _private(key)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca)

    @property
    def client_context(self) -> ssl.SSLContext:
        """For asyncio; the caller checks the peer's name itself (`name_in`)."""
        return self._client

    def wrap_server(self, sock: socket.socket, *, timeout_s: float = HANDSHAKE_S) -> TlsSocket:
        """Takes the socket over. Blocks for the handshake. Raises AccessDenied or Unavailable, the socket closed."""
        return TlsSocket(sock, self._server, timeout_s, server=True)

    def wrap_client(self, sock: socket.socket, host: str = "", *, timeout_s: float = HANDSHAKE_S) -> TlsSocket:
        """Takes the socket over. Raises AccessDenied if the server is no node of our authority, Unavailable."""
        wrapped = TlsSocket(sock, self._client, timeout_s, server=False, host=host or None)
        if not wrapped.peer_name.startswith(NODE_PREFIX):
            wrapped.close()
            raise AccessDenied(
                f"the server's certificate is no node's: it names '{wrapped.peer_name}', expected '{NODE_PREFIX}NAME'"
            )
        return wrapped


class TlsSocket(socket.socket):
    """A connected TLS socket for one reading and one writing thread.

    Python's own SSL sockets are not safe for that before 3.13, and lack `sendmsg`, `recvmsg_into` and `sendfile`: here
    they exist and cost the copies that encryption needs. What bypasses Python's socket methods (a system call on
    `fileno`) would read and write ciphertext: ask `is_tls` first.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, timeout_s: float, *, server: bool, host: str | None = None
    ) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server, server_hostname=host)
        # One for the state of the session, one for the order of records on the wire.
        self._lock, self._send_lock = threading.Lock(), threading.Lock()
        self.peer_name = ""
        self.settimeout(timeout_s)
        try:
            self._negotiate()
            self.peer_name = name_in(self._tls.getpeercert() or {})
        except (ssl.SSLError, OSError, AccessDenied) as error:
            self._say_why()
            self.close()
            raise _refusal(error) from error
        self.settimeout(None)

    # --- receiving

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        buffer = bytearray(min(bufsize, RECEIVE_BYTES))
        return bytes(memoryview(buffer)[: self.recv_into(buffer, 0, flags)])

    def recv_into(self, buffer: WriteableBuffer, nbytes: int = 0, flags: int = 0) -> int:
        """As without TLS; of the flags MSG_WAITALL counts."""
        view = memoryview(buffer).cast("B")
        view = view[:nbytes] if nbytes else view
        got = 0
        while got < len(view):
            count = self._read(view[got:], wait=got == 0 or bool(flags & socket.MSG_WAITALL))
            if count == 0:
                break
            got += count
        return got

    def recvmsg_into(
        self, buffers: Iterable[WriteableBuffer], ancbufsize: int = 0, flags: int = 0
    ) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        total = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if total and not flags & socket.MSG_WAITALL and not self._pending():
                break
            count = self.recv_into(view, 0, flags)
            total += count
            if count < len(view):
                break
        return total, [], 0, None

    # --- sending

    def send(self, data: ReadableBuffer, flags: int = 0) -> int:
        """Sends everything. With MSG_DONTWAIT it sends nothing (BlockingIOError): a record cannot be taken back."""
        if flags & socket.MSG_DONTWAIT:
            raise BlockingIOError("a TLS socket sends whole records")
        view = memoryview(data).cast("B")
        self.sendall(view)
        return len(view)

    def sendall(self, data: ReadableBuffer, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        with self._send_lock:
            for at in range(0, len(view), SEND_BYTES):
                with self._lock:
                    self._tls.write(view[at : at + SEND_BYTES])
                    sealed = self._outgoing.read()
                super().sendall(sealed)

    def sendmsg(self, buffers: Iterable[ReadableBuffer], ancdata: Any = (), flags: int = 0, address: Any = None) -> int:
        parts = [memoryview(buffer).cast("B") for buffer in buffers]
        total = sum(map(len, parts))
        # Small parts (a header, then its body) share a record.
        if total <= SEND_BYTES:
            self.sendall(b"".join(parts))
        else:
            for part in parts:
                self.sendall(part)
        return total

    def sendfile(self, file: IO[bytes], offset: int = 0, count: int | None = None) -> int:  # type: ignore[override]
        file.seek(offset)
        sent = 0
        while count is None or sent < count:
            data = file.read(SEND_BYTES if count is None else min(SEND_BYTES, count - sent))
            if not data:
                break
            self.sendall(data)
            sent += len(data)
        return sent

    # --- records

    def _negotiate(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                super().sendall(self._outgoing.read())
                self._fill()
                continue
            super().sendall(self._outgoing.read())
            return

    def _read(self, view: memoryview, *, wait: bool) -> int:
        """Bytes of what has arrived; 0 at the end, or where nothing is there and `wait` is False."""
        while True:
            try:
                with self._lock:
                    return self._tls.read(len(view), view)  # type: ignore[return-value]  # typeshed
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            self._answer()
            if not wait:
                return 0
            self._fill()

    def _fill(self) -> None:
        """Wait for ciphertext. The lock is not held while waiting."""
        data = super().recv(RECEIVE_BYTES)
        with self._lock:
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()

    def _answer(self) -> None:
        """What the protocol itself has to say, e.g. that it changed its keys."""
        if self._outgoing.pending:
            with self._send_lock:
                with self._lock:
                    sealed = self._outgoing.read()
                super().sendall(sealed)

    def _pending(self) -> bool:
        return bool(self._incoming.pending or self._tls.pending())

    def _say_why(self) -> None:
        """The alert that the session left behind: the other side's error names the cause."""
        with contextlib.suppress(OSError):
            super().sendall(self._outgoing.read())


def is_tls(sock: socket.socket) -> bool:
    return isinstance(sock, TlsSocket)


def certificate_name(sock: socket.socket) -> str:
    """`tenant:NAME` or `node:NAME` of a TLS peer, else empty."""
    return sock.peer_name if isinstance(sock, TlsSocket) else ""


def name_in(certificate: Any) -> str:
    """The name in what `getpeercert` returned. Raises AccessDenied if it names several."""
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    names = {name for name in (*common, *uris) if name.startswith((NODE_PREFIX, TENANT_PREFIX))}
    if len(names) > 1:
        raise AccessDenied(f"the certificate names more than one caller: {', '.join(sorted(names))}")
    return names.pop() if names else next(iter(common), "")


def _context(protocol: int, cert: str, key: str, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        # Sessions are not resumed, and unread tickets would turn a client's close into a reset.
        context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(cert, key, password=_no_passphrase)
    except OSError as error:
        raise ConfigError(f"security.tls_cert {cert} with tls_key {key}: {_reason(error)}") from error
    try:
        context.load_verify_locations(ca)
    except OSError as error:
        raise ConfigError(f"security.tls_ca {ca}: {_reason(error)}") from error
    return context


def _no_passphrase() -> str:
    raise ConfigError("security.tls_key is encrypted: store it without a passphrase, mode 0600")


def _private(key: str) -> None:
    try:
        mode = Path(key).stat().st_mode
    except OSError as error:
        raise ConfigError(f"security.tls_key {key}: {error.strerror}") from error
    if mode & 0o077:
        raise ConfigError(f"security.tls_key {key} can be read by others: run `chmod 600 {key}`")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not usable ({error.reason or 'no certificate in PEM form'})"
    return str(error.strerror)


def _refusal(error: Exception) -> AccessDenied | Unavailable:
    if isinstance(error, AccessDenied):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        return AccessDenied(f"the other side's certificate is not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLEOFError):
        return Unavailable("the other side closed during the TLS handshake: does it use TLS?")
    if isinstance(error, ssl.SSLError):
        return AccessDenied(f"TLS failed: {error.reason or error}")
    if isinstance(error, TimeoutError):
        return Unavailable("the other side does not answer in TLS: does it use TLS?")
    return Unavailable(f"the connection broke during the TLS handshake: {error}")
