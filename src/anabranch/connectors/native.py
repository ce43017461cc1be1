"""The engine's `KvPort` onto its node: messages over a UNIX socket, pages in the node's shared arena.

**Covers** translation, re-attachment after the node was restarted, and the events that the contract promises when it
is gone. **Does not cover** what the node decides (`store.node`).

Locking: calls come from the engine's thread, messages from the link's; `_lock` guards the books, and events go out
after it is released.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from anabranch.blocks.layout import KvLayout
from anabranch.connectors.port_state import PortState
from anabranch.core.errors import AnabranchError, LayoutMismatch, Unavailable
from anabranch.core.live.link import Link, connect
from anabranch.core.messages import Message
from anabranch.engine import kv_port as port
from anabranch.store import messages as m
from anabranch.transfer.api import Ticket
from anabranch.transfer.live.arena import Arena

RETRY_S = 0.05


class NativePort:
    """`sink(event)` is called from the port's threads (from the caller's for answers while the node is gone).

    The constructor waits until the node has answered. Raises Unavailable after `connect_timeout_s`, LayoutMismatch if
    the node holds another layout.
    """

    def __init__(
        self,
        node_address: str,
        layout: KvLayout,
        sink: Callable[[port.PortEvent], None],
        *,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.layout = layout
        self._address = node_address
        self._sink = sink
        self._session = secrets.token_bytes(16)
        self._lock = threading.RLock()
        self._state = PortState()
        self._link: Link | None = None
        self._arena: Arena | None = None
        self._closing = threading.Event()
        self._attached = threading.Event()
        self._lost = threading.Event()
        self._fatal: AnabranchError | None = None
        self._ended: list[port.PortEvent] = []
        self._broken = False
        self.total_slots = 0
        self._thread = threading.Thread(target=self._run, name="native-port", daemon=True)
        self._thread.start()
        if not self._attached.wait(connect_timeout_s) or self._arena is None:
            self.close()
            raise self._fatal or Unavailable(f"no node answers at {node_address}; start it first")

    @property
    def memory(self) -> memoryview:
        """Writable `[total_slots][Full Block]`, valid until `close`."""
        if self._arena is None:
            raise Unavailable("the port is closed")
        return self._arena.data

    @property
    def held(self) -> dict[int, int]:
        """Slots that the engine has, with the number of references."""
        with self._lock:
            return dict(self._state.held)

    # --- KvPort -------------------------------------------------------------------------------------------------

    def acquire(self, op: int, keys: Sequence[bytes], *, tenant: str, load: bool, deadline_s: float) -> None:
        message = m.Acquire(op=op, keys=list(keys), tenant=tenant, load=load, deadline_s=deadline_s)
        with self._lock:
            if self._send(message):
                self._state.acquires[op] = None
                return
        self._sink(port.Acquired(op=op, ready=[], loading=[]))

    def cancel_load(self, op: int) -> None:
        with self._lock:
            self._send(m.CancelLoad(op=op))

    def reserve(self, op: int, count: int) -> None:
        with self._lock:
            self._state.reserves[op] = count
            self._send(m.Reserve(op=op, count=count))

    def commit(self, blocks: Sequence[port.Filled], *, tenant: str) -> None:
        with self._lock:
            self._send(m.Commit(blocks=[(b.slot, b.key, b.parent) for b in blocks], tenant=tenant))

    def free(self, slots: Sequence[int]) -> None:
        with self._lock:
            known = self._state.give_back(slots)
            if known:
                self._send(m.Free(slots=known))

    def open_inbound(self, handoff: str, slots: Sequence[int], *, first: int, deadline_s: float) -> None:
        message = m.OpenInbound(handoff=handoff, slots=list(slots), first=first, deadline_s=deadline_s)
        with self._lock:
            if self._send(message):
                self._state.inbound.add(handoff)
                return
        self._sink(port.InboundEnded(handoff=handoff, reason="the node is gone"))

    def open_outbound(self, handoff: str, ticket: Ticket) -> None:
        with self._lock:
            if self._send(m.OpenOutbound(handoff=handoff, ticket=ticket)):
                self._state.outbound.add(handoff)
                return
        self._sink(port.OutboundEnded(handoff=handoff, reason="the node is gone"))

    def push_layer(self, handoff: str, layer: int, blocks: Sequence[tuple[int, int]]) -> None:
        with self._lock:
            if handoff in self._state.outbound:
                self._send(m.PushLayer(handoff=handoff, layer=layer, blocks=list(blocks)))

    def finish_outbound(self, handoff: str) -> None:
        with self._lock:
            if handoff in self._state.outbound:
                self._send(m.FinishOutbound(handoff=handoff))

    def abandon(self, handoff: str) -> None:
        with self._lock:
            if handoff in self._state.outbound or handoff in self._state.inbound:
                self._send(m.Abandon(handoff=handoff))

    def close(self) -> None:
        """Give every reference back and leave. No event follows."""
        self._closing.set()
        with self._lock:
            self._send(m.Detach())
            link = self._link
        self._lost.set()
        if link is not None:
            link.close("port closed")
        self._thread.join(5.0)
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    # --- connection ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set() and self._fatal is None:
            self._lost.clear()
            link = self._connect()
            if link is not None:
                self._lost.wait()
                link.close()
                link.join()
                self._down()
            else:
                self._tell_loss()
                self._closing.wait(RETRY_S)
        self._tell_loss()

    def _connect(self) -> Link | None:
        try:
            sock = connect(self._address)
        except Unavailable:
            return None
        link = Link(sock, m.NodeToPort, self._received, self._closed, name="native-port")
        link.start()
        with self._lock:
            # From here on the engine's messages may go out: the node reads them after this Attach.
            if not link.send(m.Attach(session=self._session, layout=self.layout, held=dict(self._state.held))):
                return link
            self._link = link
            for op, count in self._state.reserves.items():
                link.send(m.Reserve(op=op, count=count))
        return link

    def _closed(self, link: Link, reason: str) -> None:
        self._lost.set()

    def _down(self) -> None:
        """The link broke: nothing can be asked any more. Whether transfers have ended is another question: a node that
        lives still moves bytes, so the engine hears of it only from `_tell_loss`."""
        with self._lock:
            self._link = None
            self._ended += self._state.end_outstanding("the node is gone")
            self._broken = True

    def _tell_loss(self) -> None:
        """The node does not listen any more, so its process ended or has let go of every page; or it has answered on
        a new link, and let go before it did. End what was outstanding; what is held stays."""
        with self._lock:
            ended, self._ended = self._ended, []
            broken, self._broken = self._broken, False
        if self._closing.is_set() or not broken:
            return
        for event in ended:
            self._sink(event)
        if self._attached.is_set():
            self._sink(port.PortLost("the node is gone"))

    def _send(self, message: Message) -> bool:
        return self._link is not None and self._link.send(message)

    # --- messages of the node -----------------------------------------------------------------------------------

    def _received(self, link: Link, message: Any) -> None:
        if isinstance(message, m.Attached):
            self._on_attached(link, message)
            return
        if isinstance(message, m.Refused):
            self._fatal = LayoutMismatch(message.reason)
            self._attached.set()
            link.close(message.reason)
            return
        with self._lock:
            event = self._state.event(message)
        if event is not None and not self._closing.is_set():
            self._sink(event)

    def _on_attached(self, link: Link, message: m.Attached) -> None:
        try:
            if self._arena is None:
                self._arena = Arena.attach(message.arena_path, self.layout, message.slots)
                self.total_slots = message.slots
            if self._arena.inode != message.arena_inode:
                raise LayoutMismatch("the node made a new arena; restart this engine to use it")
        except AnabranchError as error:
            self._fatal = error
            self._attached.set()
            link.close(str(error))
            return
        with self._lock:
            self._state.forget(message.lost)
        first = not self._attached.is_set()
        self._tell_loss()
        self._attached.set()
        if not first:
            self._sink(port.PortBack(sorted(message.lost)))
