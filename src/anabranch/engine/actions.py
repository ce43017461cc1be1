"""What the scheduler wants done. Structs only: the driver (worker, test or simulator) applies them in order.

Every action but `Send` is a call on the engine's `KvPort`; the fields and promises are those of that call.
"""

from __future__ import annotations

import msgspec

from anabranch.core.messages import Message
from anabranch.engine.kv_port import Filled, KvPort
from anabranch.transfer.api import Ticket


class Send(msgspec.Struct, frozen=True):
    """Send this to the gateway that owns the request(s) named in it."""

    message: Message


class Acquire(msgspec.Struct, frozen=True, kw_only=True):
    op: int
    keys: list[bytes]
    tenant: str
    load: bool
    deadline_s: float

    def apply(self, port: KvPort) -> None:
        port.acquire(self.op, self.keys, tenant=self.tenant, load=self.load, deadline_s=self.deadline_s)


class CancelLoad(msgspec.Struct, frozen=True):
    op: int

    def apply(self, port: KvPort) -> None:
        port.cancel_load(self.op)


class Reserve(msgspec.Struct, frozen=True):
    op: int
    count: int

    def apply(self, port: KvPort) -> None:
        port.reserve(self.op, self.count)


class Commit(msgspec.Struct, frozen=True):
    blocks: list[Filled]
    tenant: str

    def apply(self, port: KvPort) -> None:
        port.commit(self.blocks, tenant=self.tenant)


class Free(msgspec.Struct, frozen=True):
    slots: list[int]

    def apply(self, port: KvPort) -> None:
        port.free(self.slots)


class OpenInbound(msgspec.Struct, frozen=True, kw_only=True):
    handoff: str
    slots: list[int]
    first: int
    deadline_s: float

    def apply(self, port: KvPort) -> None:
        port.open_inbound(self.handoff, self.slots, first=self.first, deadline_s=self.deadline_s)


class OpenOutbound(msgspec.Struct, frozen=True):
    handoff: str
    ticket: Ticket

    def apply(self, port: KvPort) -> None:
        port.open_outbound(self.handoff, self.ticket)


class PushLayer(msgspec.Struct, frozen=True):
    handoff: str
    layer: int
    blocks: list[tuple[int, int]]

    def apply(self, port: KvPort) -> None:
        port.push_layer(self.handoff, self.layer, self.blocks)


class FinishOutbound(msgspec.Struct, frozen=True):
    handoff: str

    def apply(self, port: KvPort) -> None:
        port.finish_outbound(self.handoff)


class Abandon(msgspec.Struct, frozen=True):
    handoff: str

    def apply(self, port: KvPort) -> None:
        port.abandon(self.handoff)


PortAction = (
    Acquire | CancelLoad | Reserve | Commit | Free | OpenInbound | OpenOutbound | PushLayer | FinishOutbound | Abandon
)
Action = Send | PortAction
