"""A small client of etcd v3 through its HTTP gateway (`/v3/…`, etcd 3.4 and later): what leadership and membership
need, and nothing else. JSON of etcd's protocol buffers: bytes are base64, 64-bit integers are text.

**Covers** leases, put-if-absent, delete-if-unchanged, ranges and watches. **Does not cover** TLS or users of etcd.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from anabranch.core.errors import ConfigError, Unavailable
from anabranch.core.live.seldom import Seldom

REQUEST_S = 1.0
WATCH_S = 5.0
"""Silence after which a watch is begun anew: its server may be gone without a word."""
RETRY_S = 0.1
LOG_EVERY_S = 30.0
"""While etcd is away, it is said so this seldom."""
SCHEME = "etcd://"
T = TypeVar("T")
log = logging.getLogger(__name__)


class Header(msgspec.Struct, frozen=True):
    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    create_revision: int = 0


class Range(msgspec.Struct, frozen=True):
    header: Header = Header()
    kvs: list[KeyValue] = []


class _Lease(msgspec.Struct, frozen=True, rename={"lease": "ID", "ttl": "TTL"}):
    lease: int = 0
    ttl: int = 0


class _Kept(msgspec.Struct, frozen=True):
    result: _Lease = _Lease()


class _Response(msgspec.Struct, frozen=True):
    response_range: Range = Range()


class _Txn(msgspec.Struct, frozen=True):
    header: Header = Header()
    succeeded: bool = False
    responses: list[_Response] = []


class _Event(msgspec.Struct, frozen=True):
    kv: KeyValue
    type: str = "PUT"


class _Watched(msgspec.Struct, frozen=True):
    header: Header = Header()
    events: list[_Event] = []
    canceled: bool = False


class _WatchLine(msgspec.Struct, frozen=True):
    result: _Watched


class EtcdAddress(msgspec.Struct, frozen=True):
    """`etcd://host:port[,host:port…][/cluster]`: members of etcd, and which of the clusters it keeps is ours."""

    endpoints: tuple[str, ...]
    cluster: str

    @property
    def prefix(self) -> str:
        return f"/anabranch/{self.cluster}/"


def parse_etcd(text: str) -> EtcdAddress:
    """Raises ConfigError."""
    hosts, _, cluster = text.removeprefix(SCHEME).partition("/")
    endpoints = tuple(host.strip() for host in hosts.split(","))
    if not all(host and colon and port.isdigit() for host, colon, port in (e.rpartition(":") for e in endpoints)):
        raise ConfigError(f"{text!r} names no etcd: expected etcd://host:port[,host:port…][/cluster]")
    return EtcdAddress(endpoints, cluster or "default")


class Etcd:
    """Calls, tried on every endpoint in turn. Not thread-safe: each thread has its own. Every call raises Unavailable
    if no endpoint does it in time."""

    def __init__(self, endpoints: tuple[str, ...], timeout_s: float = REQUEST_S) -> None:
        self._endpoints = endpoints
        self._timeout_s = timeout_s
        self._first = 0
        self._connection: http.client.HTTPConnection | None = None
        self._watching: socket.socket | None = None

    def interrupt(self) -> None:
        """End a watch under way, from another thread."""
        sock = self._watching
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def grant(self, ttl_s: int) -> tuple[int, float]:
        """A new lease and how long etcd lets it live: at least about 1.5 of its election timeouts (2 s by default)."""
        lease = self._call("lease/grant", {"TTL": ttl_s}, _Lease)
        return lease.lease, float(lease.ttl)

    def keep_alive(self, lease: int) -> float:
        """Seconds that it lives from when etcd heard this; 0: it is over."""
        return float(self._call("lease/keepalive", {"ID": lease}, _Kept).result.ttl)

    def revoke(self, lease: int) -> None:
        with contextlib.suppress(Unavailable):
            self._call("lease/revoke", {"ID": lease}, msgspec.Raw)

    def create(self, key: str, value: bytes, lease: int = 0) -> KeyValue | int:
        """Put `key` if it is absent: the revision at which it was created, or what is there."""
        request = {"key": key.encode(), "value": value, "lease": lease}
        result = self._call(
            "kv/txn",
            {
                "compare": [{"key": key.encode(), "target": "CREATE", "result": "EQUAL", "create_revision": 0}],
                "success": [{"request_put": request}],
                "failure": [{"request_range": {"key": key.encode()}}],
            },
            _Txn,
        )
        if result.succeeded:
            return result.header.revision
        return result.responses[0].response_range.kvs[0]

    def put(self, key: str, value: bytes, lease: int = 0) -> None:
        self._call("kv/put", {"key": key.encode(), "value": value, "lease": lease}, msgspec.Raw)

    def delete_created_at(self, key: str, revision: int) -> bool:
        """Delete `key` if it is still the one created at `revision`."""
        compare = {"key": key.encode(), "target": "CREATE", "result": "EQUAL", "create_revision": revision}
        request = {"request_delete_range": {"key": key.encode()}}
        return self._call("kv/txn", {"compare": [compare], "success": [request]}, _Txn).succeeded

    def range(self, prefix: str) -> Range:
        return self._call("kv/range", _prefix(prefix), Range)

    def watch(self, prefix: str, revision: int) -> Iterator[list[_Event]]:
        """Changes from `revision` on. Ends when the watch does; raises Unavailable when the connection does."""
        connection, response = self._request(
            "watch", {"create_request": {**_prefix(prefix), "start_revision": revision}}, WATCH_S
        )
        rest, self._watching = b"", connection.sock
        try:
            while data := response.read1(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    watched = msgspec.json.decode(line, type=_WatchLine, strict=False).result
                    if watched.canceled:
                        return
                    yield watched.events
        except TimeoutError:
            return
        except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
            raise Unavailable(f"etcd: the watch broke: {error}") from error
        finally:
            self._watching = None
            connection.close()

    def _call(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        connection, response = self._request(path, body, self._timeout_s)
        try:
            data = response.read()
            answer = msgspec.json.decode(data, type=kind, strict=False)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
            connection.close()
            raise Unavailable(f"etcd: bad answer to {path}: {error}") from error
        self._connection = connection
        return answer

    def _request(
        self, path: str, body: dict[str, Any], timeout_s: float
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """The connection is the caller's until it gives it back."""
        data, failures = msgspec.json.encode(body), []
        for attempt in range(len(self._endpoints) + 1):
            kept, self._connection = self._connection, None
            endpoint = self._endpoints[(self._first + attempt) % len(self._endpoints)]
            connection = kept or http.client.HTTPConnection(endpoint, timeout=self._timeout_s)
            try:
                connection.request("POST", f"/v3/{path}", body=data)
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                response = connection.getresponse()
                if response.status == 200:
                    self._first = (self._first + attempt) % len(self._endpoints)
                    return connection, response
                failures.append(f"{endpoint}: {response.read()[:200].decode(errors='replace')}")
            except (OSError, http.client.HTTPException) as error:
                failures.append(f"{endpoint}: {error or type(error).__name__}")
            connection.close()
        where = ",".join(self._endpoints)
        raise Unavailable(f"etcd at {where} cannot be reached ({path}): {'; '.join(failures)}")


class PrefixView:
    """All keys under a prefix, kept current by a thread. `changed(view)` runs on it after every change, the first time
    when they are known; `entries` maps each key's rest to its value and revision of creation. While etcd is away, they
    are what they last were."""

    def __init__(self, endpoints: tuple[str, ...], prefix: str, changed: Callable[[PrefixView], None]) -> None:
        self._prefix = prefix
        self._etcd = Etcd(endpoints)
        self._changed = changed
        self._closing = threading.Event()
        self.entries: dict[str, KeyValue] = {}
        self.known = False
        self.problem = ""
        self._seldom = Seldom(LOG_EVERY_S)
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        while self._thread.is_alive() and self._thread is not threading.current_thread():
            self._etcd.interrupt()
            self._thread.join(0.05)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                found = self._etcd.range(self._prefix)
                self.problem = ""
                self._replace({self._rest(kv): kv for kv in found.kvs})
                for events in self._etcd.watch(self._prefix, found.header.revision + 1):
                    if self._closing.is_set():
                        break
                    if events:
                        self._apply(events)
            except Unavailable as error:
                self.problem = str(error)
                if not self._closing.is_set() and self._seldom.due():
                    log.warning("membership: %s", error)
                self._closing.wait(RETRY_S)
        self._etcd.close()

    def _apply(self, events: list[_Event]) -> None:
        entries = dict(self.entries)
        for event in events:
            if event.type == "DELETE":
                entries.pop(self._rest(event.kv), None)
            else:
                entries[self._rest(event.kv)] = event.kv
        self._replace(entries)

    def _replace(self, entries: dict[str, KeyValue]) -> None:
        if entries != self.entries or not self.known:
            self.entries, self.known = entries, True
            self._changed(self)

    def _rest(self, kv: KeyValue) -> str:
        return kv.key.decode(errors="replace").removeprefix(self._prefix)


def _prefix(prefix: str) -> dict[str, bytes]:
    start = prefix.encode()
    return {"key": start, "range_end": start[:-1] + bytes([start[-1] + 1])}
