"""Looking after a running store: ask its directory and nodes how they are, and tell nodes what to do.

**Covers** calls of trusted callers, one lane each. **Does not cover** values by key (`client`) or showing anything
(`cli`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

from anabranch.core.errors import AccessDenied, AnabranchError, Unavailable, WireError
from anabranch.core.live.handshake import Dialer
from anabranch.core.messages import Message
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.stat_client import ask_stat
from anabranch.store.messages import Stat, StatRequest
from anabranch.store.values.live.lane import Lane
from anabranch.store.values.live.session import Session
from anabranch.store.values.messages import (
    Denied,
    Done,
    Drain,
    Entries,
    Found,
    Get,
    Invalidate,
    Listing,
    Offer,
    Put,
    Stored,
    Verify,
    Welcome,
)
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.report import DirectoryReport, Listed, NodeReport, StoreReport
from anabranch.store.values.scope import Key, Scope, name_of
from anabranch.store.values.slices import slice_sums

LISTED = 1000
PROBE_S = 2.0
_PROBE_BYTES = b"anabranch probe"
M = TypeVar("M")


class Administrator:
    """`directory`: as in `store.directory`, or empty; `nodes`: addresses to ask as well. Raises what `Session.open`
    and `DirectoryLink` raise. Every call is bounded by `timeout_s` unless it says otherwise."""

    def __init__(
        self, session: Session, directory: str = "", nodes: Sequence[str] = (), timeout_s: float = 5.0
    ) -> None:
        self._session = session
        self._directory = directory
        self._extra = list(nodes)
        self._timeout_s = timeout_s
        self._link = directory_link(directory, session) if directory else None

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def addresses(self) -> dict[str, str]:
        """Address → node id of every node. Raises Unavailable if there is none."""
        rows = self._link.nodes(self._timeout_s) if self._link is not None else []
        found = {row.address: row.node_id for row in rows}
        for address in self._extra:
            found.setdefault(address, "")
        if not found:
            raise Unavailable("the directory knows no node" if self._directory else "no directory and no node is named")
        return found

    def report(self) -> StoreReport:
        """Everybody's own account. Never raises for one that does not answer."""
        leaders = self._link.addresses if self._link is not None else []
        directories = [self._directory_report(address) for address in leaders]
        try:
            rows = self._link.nodes(self._timeout_s) if self._link is not None else []
        except Unavailable as error:
            rows = []
            directories = directories or [DirectoryReport(self._directory, problem=str(error))]
        accepting = {row.address: (row.node_id, row.accepts) for row in rows}
        for address in self._extra:
            accepting.setdefault(address, ("", True))
        nodes = [self._node_report(address, *known) for address, known in accepting.items()]
        return StoreReport(directories, nodes)

    def stat(self, address: str) -> Stat:
        return self.call(address, StatRequest(), Stat, trusted=False)

    def entries(self, address: str, node_id: str = "") -> Iterator[Listed]:
        """Everything a node holds, in order of names, over one lane."""
        lane, welcome = self._trusted(address)
        try:
            after = b""
            while True:
                lane.until(time.monotonic() + self._timeout_s)
                lane.send(Listing(op=1, after=after, limit=LISTED))
                rows = expected(lane.receive(), Entries, address).rows
                for name, size, scope, tier, uses in rows:
                    yield Listed(node_id or welcome.node_id, name, size, scope, tier, uses)
                if len(rows) < LISTED:
                    return
                after = rows[-1][0]
        finally:
            lane.close()

    def find(self, key: Key, scope: Scope) -> tuple[bytes, list[Listed]]:
        """The key's name and its copies, without any effect on them. Raises AccessDenied if we are not trusted."""
        addresses = self.addresses()
        name = b""
        copies: list[Listed] = []
        for address, node_id in addresses.items():
            lane, welcome = self._trusted(address)
            try:
                name = name_of(key, scope.name_key(welcome.salt))
                lane.until(time.monotonic() + self._timeout_s)
                lane.send(Listing(op=1, after=_before(name), limit=1))
                rows = expected(lane.receive(), Entries, address).rows
            finally:
                lane.close()
            copies += [
                Listed(node_id or welcome.node_id, *row) for row in rows if row[0] == name and row[2] == scope.digest()
            ]
        return name, copies

    def drain(self, address: str, deadline_s: float) -> Done:
        """Returns once the node has handed over what it holds, or its deadline passed."""
        return self.call(address, Drain(op=1, deadline_s=deadline_s), Done, wait_s=deadline_s + self._timeout_s)

    def verify(self, address: str, wait_s: float) -> Done:
        return self.call(address, Verify(op=1), Done, wait_s=wait_s)

    def invalidate(self, address: str, tenant: str, epoch: str | None, wait_s: float, *, everywhere: bool) -> Done:
        message = Invalidate(op=1, tenant=tenant, epoch=epoch, everywhere=everywhere)
        # A tenant may do this to its own values.
        return self.call(address, message, Done, wait_s=wait_s, trusted=False)

    def call(
        self, address: str, message: Message, kind: type[M], *, wait_s: float | None = None, trusted: bool = True
    ) -> M:
        """One request on a lane of its own. Raises AccessDenied if it is one of `trusted` callers and we are not."""
        deadline = time.monotonic() + (self._timeout_s if wait_s is None else wait_s)
        lane, _ = self._trusted(address) if trusted else self._session.open(address, self._timeout_s)
        with closing(lane):
            lane.until(deadline)
            lane.send(message)
            return expected(lane.receive(), kind, address)

    def _trusted(self, address: str) -> tuple[Lane, Welcome]:
        lane, welcome = self._session.open(address, self._timeout_s)
        if not welcome.trusted:
            lane.close()
            raise AccessDenied(f"{address}: only trusted callers may do this: the cluster's secret is needed")
        return lane, welcome

    def _node_report(self, address: str, node_id: str, accepts: bool) -> NodeReport:
        try:
            stat = self.stat(address)
        except AnabranchError as error:
            return NodeReport(node_id or address, address, accepts, problem=str(error))
        return NodeReport(node_id or stat.name, address, accepts, stat)

    def _directory_report(self, address: str) -> DirectoryReport:
        if not address:
            return DirectoryReport(address, problem="nobody leads this shard; a new leader takes over within seconds")
        try:
            return DirectoryReport(address, directory_stat(address, self._session, self._timeout_s))
        except AnabranchError as error:
            return DirectoryReport(address, problem=str(error))


def _before(name: bytes) -> bytes:
    """The greatest name below this one."""
    return (int.from_bytes(name, "big") - 1).to_bytes(len(name), "big")


def probe(address: str, session: Session) -> None:
    """Put (once) and get a small value through a node's own listener. Raises the AnabranchError that says what is
    wrong; returns within PROBE_S and a little."""
    deadline = time.monotonic() + PROBE_S
    lane, welcome = session.open(address, PROBE_S)
    try:
        scope = Scope(session.credentials.tenant, session.credentials.namespace, session.credentials.epoch)
        name = name_of("probe", scope.name_key(welcome.salt))
        for _ in range(2):
            lane.until(deadline)
            lane.send(Get(op=1, names=name, limit=4096))
            found = expected(lane.receive(), Found, address)
            if found.outcomes == bytes([Outcome.OK]) and found.inline:
                data = bytearray(found.sizes[0])
                lane.receive_bytes(memoryview(data))
                if data != _PROBE_BYTES:
                    raise WireError(f"{address} answers the probe with other bytes")
                return
            offer = Offer(op=2, names=name, sizes=[len(_PROBE_BYTES)], replicas=1, wait_s=PROBE_S / 2)
            lane.send(Put(offer=offer, sums=slice_sums(_PROBE_BYTES)), payload=[memoryview(_PROBE_BYTES)])
            stored = expected(lane.receive(), Stored, address)
            if stored.outcomes[0] in (Outcome.FULL, Outcome.TOO_BIG):
                return  # it answers: a full store serves
            if not Outcome(stored.outcomes[0]).stored:
                raise Unavailable(f"{address} cannot store: {Outcome(stored.outcomes[0]).name}")
        raise Unavailable(f"{address} loses what it has just stored")
    finally:
        lane.close()


def expected(reply: Any, kind: type[M], address: str) -> M:
    """The reply if it is of that kind. Raises AccessDenied or WireError."""
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Denied):
        raise AccessDenied(f"{address}: {reply.reason}")
    raise WireError(f"{address} answers with {type(reply).__name__} instead of {kind.__name__}")


def directory_link(directory: str, session: Session) -> DirectoryLink:
    return DirectoryLink(directory, dial=Dialer(session.credentials, session.tls))


def directory_stat(address: str, session: Session, timeout_s: float) -> Stat:
    return ask_stat(address, timeout_s=timeout_s, dial=Dialer(session.credentials, session.tls))
