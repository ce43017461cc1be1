"""Somebody who talks to nodes' peer ports without the right to: handles that are unknown, guessed, consumed or out of
range, frames that are none, blocks of another tenant. Each attempt must be refused; one that is not is a breach."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import AnabranchError
from anabranch.core.live.link import connect
from anabranch.testing.chaos.live.tamper import Tickets
from anabranch.transfer.api import Address, Ticket
from anabranch.transfer.layouts import layout_digest, tenant_digest
from anabranch.transfer.live.stream import Stream
from anabranch.transfer.messages import (
    FetchHeader,
    FetchReply,
    FetchRequest,
    PushAccepted,
    PushFrame,
    PushOpen,
    PushReply,
    PushResult,
)

PATIENCE_S = 2.0


class Stranger:
    """`tried` counts attempts by kind; `breaches` describes those that were not refused."""

    def __init__(self, layout: KvLayout, seed: int, tickets: Tickets) -> None:
        self._layout = layout
        self._digest = layout_digest(layout)
        self._random = random.Random(seed)
        self._tickets = tickets
        self._pushes: msgspec.msgpack.Decoder[PushReply] = msgspec.msgpack.Decoder(PushReply)
        self._fetches: msgspec.msgpack.Decoder[FetchReply] = msgspec.msgpack.Decoder(FetchReply)
        self._done: deque[Ticket] = deque(maxlen=64)
        self.tried: Counter[tuple[str, str]] = Counter()
        self.breaches: list[str] = []

    def consumed(self, ticket: Ticket) -> None:
        """This hand-off is over for certain: whoever presents its handle again must be refused."""
        self._done.append(ticket)

    def push(self, addresses: Sequence[Address]) -> None:
        """One attempt at pushing. Blocks for a moment."""
        kind = self._random.choice(("unknown", "guessed", "consumed", "out_of_range", "garbage"))
        live = self._tickets[-1][1] if self._tickets else None
        if kind == "unknown":
            self._refused(kind, self._random.choice(addresses), "no such hand-off", self._random.randbytes(16))
        elif kind == "guessed" and live is not None:
            self._refused(kind, live.address, live.handoff, self._random.randbytes(16))
        elif kind == "consumed" and self._done:
            old = self._random.choice(self._done)
            self._refused(kind, old.address, old.handoff, old.secret)
        elif kind == "out_of_range" and live is not None:
            self._out_of_range(live)
        elif kind == "garbage":
            self._garbage(self._random.choice(addresses))

    def fetch(self, address: Address, keys: list[bytes], tenant: str) -> None:
        """Ask for blocks in the name of a tenant that they do not belong to."""
        self.tried["stranger.fetch", "foreign_tenant"] += 1
        request = FetchRequest(keys=keys, tenant=tenant_digest(tenant), layout=self._digest, deadline_s=PATIENCE_S)

        def ask(stream: Stream) -> None:
            stream.send(request)
            header = stream.receive(self._fetches, PATIENCE_S)
            if isinstance(header, FetchHeader) and header.count:
                self.breaches.append(f"{address} served {header.count} blocks of another tenant")

        self._with(address, ask)

    def _refused(self, kind: str, address: Address, handoff: str, secret: bytes) -> None:
        self.tried["stranger.push", kind] += 1

        def push(stream: Stream) -> None:
            stream.send(PushOpen(handoff=handoff, secret=secret, layout=self._digest))
            if isinstance(stream.receive(self._pushes, PATIENCE_S), PushAccepted):
                self.breaches.append(f"{address} accepted a push with a {kind} handle ({handoff})")

        self._with(address, push)

    def _out_of_range(self, ticket: Ticket) -> None:
        """Right handle, wrong block: it costs the hand-off, and nothing else."""
        self.tried["stranger.push", "out_of_range"] += 1

        def push(stream: Stream) -> None:
            stream.send(PushOpen(handoff=ticket.handoff, secret=ticket.secret, layout=self._digest))
            if not isinstance(stream.receive(self._pushes, PATIENCE_S), PushAccepted):
                return
            block = ticket.first + ticket.blocks + self._random.randint(0, 3)
            stream.send(PushFrame(layer=0, blocks=[block], sums=[0]))
            stream.send_views([memoryview(bytes(self._layout.layer_block_bytes))])
            result: Any = stream.receive(self._pushes, PATIENCE_S)
            if not isinstance(result, PushResult) or not result.reason:
                self.breaches.append(f"{ticket.address} took block {block} of {ticket.handoff}")

        self._with(ticket.address, push)

    def _garbage(self, address: Address) -> None:
        self.tried["stranger.push", "garbage"] += 1
        data = self._random.randbytes(self._random.randint(1, 200))
        self._with(address, lambda stream: stream.send_views([memoryview(data)]))

    def _with(self, address: Address, talk: Callable[[Stream], None]) -> None:
        try:
            stream = Stream(connect(str(address), timeout_s=PATIENCE_S), PATIENCE_S)
        except AnabranchError:
            return  # the node is being restarted
        try:
            talk(stream)
        except AnabranchError:
            # Refused by closing the connection, which is as good.
            self.tried["stranger.push", "hung_up_on"] += 1
        finally:
            stream.close()
