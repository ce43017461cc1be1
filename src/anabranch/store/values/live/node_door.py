"""Who comes to a value node: accepting lanes, letting callers in, one thread for each lane until it ends."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from anabranch.core.authentication import NONCE_BYTES, Access, Caller
from anabranch.core.errors import AnabranchError, InvariantBroken, WireError
from anabranch.core.live.handshake import peer_of
from anabranch.core.live.strangers import Strangers
from anabranch.core.live.tls import Tls, certificate_name
from anabranch.store.messages import Stat, StatRequest
from anabranch.store.values import introduction
from anabranch.store.values.live.node_custody import Custody, NodeSession
from anabranch.store.values.live.node_lane import NodeLane
from anabranch.store.values.live.node_lanes import PEER_PREFIX
from anabranch.store.values.live.node_tiers import NodeTiers
from anabranch.store.values.live.request_log import refused
from anabranch.store.values.messages import Denied, Greeting, Hello, Welcome
from anabranch.store.values.scope import Scope
from anabranch.transfer.live.rails import Links

MAX_LANES = 1024
FRAME_BYTES = 16 << 20
HELD_ANSWERS = 3
"""Answers whose bytes were sent by reference and may still be unread: a caller has at most so many requests under way,
so that the next message shows that the first of them was read."""
log = logging.getLogger(__name__)
Handler = Callable[[NodeLane, NodeSession, Any], "int | None"]
"""Answers one message. Returns the lease that holds what was sent by reference, if one does."""


class Door:
    """`handlers`: by type of message. `welcome(caller, proof)`: what a caller is told when it is let in."""

    def __init__(
        self,
        node_id: str,
        custody: Custody,
        tiers: NodeTiers,
        access: Access,
        tls: Tls | None,
        links: Links,
        handlers: Mapping[type, Handler],
        welcome: Callable[[Caller, bytes], Welcome],
        stat: Callable[[], Stat],
    ) -> None:
        self._node_id = node_id
        self._custody = custody
        self._tiers = tiers
        self._access = access
        self._tls = tls
        self._links = links
        self._handlers = handlers
        self._welcome = welcome
        self._stat = stat
        self._strangers = Strangers()
        self._lanes: set[NodeLane] = set()
        self._threads: set[threading.Thread] = set()
        self._sessions: dict[tuple[bytes, bytes, bool], NodeSession] = {}
        self._bytes = [0, 0]
        self._closing = False

    def close(self) -> None:
        """End all lanes; nobody else is let in."""
        with self._custody.lock:
            self._closing = self._custody.closing = True
            self._custody.freed.notify_all()
            lanes, threads = list(self._lanes), list(self._threads)
        for lane in lanes:
            lane.shut()
        for thread in threads:
            thread.join(5.0)

    def census(self) -> dict[str, int]:
        """Under the lock."""
        return {"lanes": len(self._lanes), "sessions": len(self._sessions), "threads": len(self._threads)}

    def bytes_moved(self) -> tuple[int, int]:
        """In and out, under the lock."""
        lanes = self._lanes
        return (
            self._bytes[0] + sum(lane.bytes_in for lane in lanes),
            self._bytes[1] + sum(lane.bytes_out for lane in lanes),
        )

    def accept(self, sock: socket.socket) -> None:
        with self._custody.lock:
            if self._closing:
                sock.close()
                return
            self._strangers.add(sock)
            thread = threading.Thread(target=self._serve, args=(sock,), name=f"{self._node_id}-lane", daemon=True)
            self._threads.add(thread)
        thread.start()

    def _serve(self, sock: socket.socket) -> None:
        """One lane, from its greeting to its end."""
        lane: NodeLane | None = None
        session: NodeSession | None = None
        try:
            if self._tls is not None and sock.family != socket.AF_UNIX:
                raw, sock = sock, self._tls.wrap_server(sock)
                self._strangers.replace(raw, sock)
            lane = NodeLane(sock)
            with self._custody.lock:
                self._lanes.add(lane)
                crowded = len(self._lanes) > MAX_LANES
            if crowded:
                reason = f"node {self._node_id} has {MAX_LANES} lanes, which is all it takes; use fewer connections"
                lane.send(Denied(reason=reason, code="overloaded"))
                return
            session = self._introduce(lane)
            self._strangers.remove(sock)
            if session is not None:
                self._exchange(lane, session)
        except (AnabranchError, OSError) as error:
            if not self._closing:
                log.debug("node %s: lane ends: %s", self._node_id, error)
            if isinstance(error, InvariantBroken):
                log.error("node %s: %s", self._node_id, error)
                with self._custody.lock:
                    self._custody.shelf.counters["invariants_broken"] += 1
            if isinstance(error, WireError) and lane is not None:
                with contextlib.suppress(AnabranchError):
                    lane.send(Denied(reason=str(error), code=error.code))
        finally:
            self._leave(lane, session, sock)

    def _introduce(self, lane: NodeLane) -> NodeSession | None:
        greeting = Greeting(
            node_id=self._node_id, nonce=secrets.token_bytes(NONCE_BYTES), authenticate=self._access.asks_proof
        )
        lane.send(greeting)
        message = lane.receive(patient=False)
        if isinstance(message, StatRequest) and not self._access.authenticates:
            lane.send(self._stat())
            return None
        if not isinstance(message, Hello):
            if message is not None:
                lane.send(Denied(reason="the first message is a Hello", code="wire_error"))
            return None
        answer = introduction.admit(self._access, greeting, message, certificate_name(lane.sock))
        if isinstance(answer, Denied):
            with self._custody.lock:
                self._custody.shelf.counters["callers_denied"] += 1
            refused(self._node_id, peer_of(lane.sock), message, answer)
            lane.send(answer)
            return None
        caller, proof = answer
        session = self._session(lane, message, caller)
        lane.permit = self._links.accepted(lane.sock, introduction.traffic_of(message, caller))
        lane.max_frame_bytes = FRAME_BYTES
        lane.send(self._welcome(caller, proof))
        return session

    def _session(self, lane: NodeLane, hello: Hello, caller: Caller) -> NodeSession:
        named = Scope(hello.tenant, hello.namespace, hello.epoch)
        self._tiers.admit(named)
        with self._custody.lock:
            scope = self._tiers.open_scope(named)
            if caller.quota_bytes or caller.pin_quota_bytes:
                self._custody.shelf.set_quota(scope.tenant, caller.quota_bytes, caller.pin_quota_bytes)
            # Another scope or standing is another session, whatever it calls itself.
            key = (hello.session, scope.digest, caller.trusted)
            session = self._sessions.get(key)
            if session is None:
                session = self._sessions[key] = NodeSession(
                    key, caller, scope, peer=hello.name if caller.trusted and hello.name.startswith(PEER_PREFIX) else ""
                )
            session.lanes.add(lane)
        return session

    def _exchange(self, lane: NodeLane, session: NodeSession) -> None:
        handlers = self._handlers
        held: deque[int] = deque()
        try:
            while (message := lane.receive()) is not None:
                if held and len(held) >= HELD_ANSWERS:
                    self._give_back(session, held.popleft())
                handler = handlers.get(type(message))
                if handler is None:
                    raise WireError(f"a caller does not send {type(message).__name__} here")
                lease = handler(lane, session, message) or 0
                if lease or held:
                    held.append(lease)
        finally:
            for lease in held:
                self._give_back(session, lease)

    def _give_back(self, session: NodeSession, lease: int) -> None:
        if lease:
            with self._custody.lock:
                self._custody.reads.give_back(session, lease)
                self._custody.notice()

    def _leave(self, lane: NodeLane | None, session: NodeSession | None, sock: socket.socket) -> None:
        self._strangers.remove(sock)
        (lane or sock).close()
        with self._custody.lock:
            if lane is not None:
                self._lanes.discard(lane)
                self._bytes[0] += lane.bytes_in
                self._bytes[1] += lane.bytes_out
                if session is not None:
                    session.lanes.discard(lane)
                    if not session.lanes:
                        self._sessions.pop(session.id, None)
                        self._custody.puts.end_session(session)
                        self._custody.reads.end_session(session)
                        self._custody.notice()
                        if all(other.scope is not session.scope for other in self._sessions.values()):
                            self._custody.shelf.scopes.forget_unused(session.scope)
            self._threads.discard(threading.current_thread())
