"""An in-process node: `LocalPort` is a `KvPort` over a `SlotPool` and a bytearray, `Fabric` is what joins several.

Everything asynchronous waits in the fabric until it is pumped, so a test decides when and, with `choose`, in which
order things happen (events of one operation or hand-off stay in order). Freed slots are poisoned. Not for production:
no quota, no tenant check, no clock (`Fabric.expire` plays a hand-off's deadline).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import InvariantBroken
from anabranch.engine.kv_port import (
    Acquired,
    Filled,
    InboundEnded,
    InboundOpened,
    LayersReady,
    LoadEnded,
    PortBack,
    PortEvent,
    PortLost,
    Reserved,
)
from anabranch.paging.pool import SlotPool
from anabranch.testing.fabric import Fabric, Inbound, Outbound, PortFaults
from anabranch.transfer.api import Address, Ticket

__all__ = ["Fabric", "LocalPort", "PortFaults"]

POISON = 0xDB


class _Loading:
    def __init__(self, slots: list[int], keys: list[bytes], parent: bytes, blocks: list[tuple[str, bytes]]) -> None:
        self.slots = slots
        self.keys = keys
        self.parent = parent
        self.blocks = blocks
        self.cancelled = ""


class LocalPort:
    """`ssd_blocks`: how many evicted blocks a pretended SSD keeps. `eager`: pump after every call (live tests)."""

    def __init__(
        self,
        fabric: Fabric,
        name: str,
        layout: KvLayout,
        slots: int,
        sink: Callable[[PortEvent], None],
        *,
        ssd_blocks: int = 0,
        faults: PortFaults | None = None,
        eager: bool = False,
    ) -> None:
        self.layout = layout
        self.total_slots = slots
        self.name = name
        self.pool = SlotPool(slots)
        self.lost = False
        self.pushed: list[tuple[str, int, int]] = []
        self._fabric = fabric
        self._sink = sink
        self._faults = faults or PortFaults()
        self._eager = eager
        self._memory = bytearray(slots * layout.full_block_bytes)
        self._ssd: dict[bytes, bytes] = {}
        self._ssd_blocks = ssd_blocks
        self._loads: dict[int, _Loading] = {}
        self._lookups: set[int] = set()
        self._stolen: dict[int, int] = {}
        self._held_reserves: list[tuple[int, int]] = []
        fabric.ports.append(self)

    @property
    def memory(self) -> memoryview:
        return memoryview(self._memory)

    # --- lookups and loads -------------------------------------------------------------------------------------

    def acquire(self, op: int, keys: Sequence[bytes], *, tenant: str, load: bool, deadline_s: float) -> None:
        with self._fabric.lock:
            self._lookups.add(op)
            self._fabric.post((self.name, op), lambda: self._look_up(op, list(keys), load))
        self._pump()

    def _look_up(self, op: int, keys: list[bytes], load: bool) -> None:
        if op not in self._lookups:
            return
        self._lookups.discard(op)
        if self.lost:
            self._sink(Acquired(op=op, ready=[], loading=[]))
            return
        ready = self.pool.acquire(keys)
        found: list[tuple[str, bytes]] = []
        for key in keys[len(ready) :] if load else []:
            source = self._find(key)
            if source is None:
                break
            found.append(source)
        slots = (self._reserve(len(found)) or []) if found else []
        self._sink(Acquired(op=op, ready=ready, loading=slots))
        if slots:
            parent = keys[len(ready) - 1] if ready else b""
            self._loads[op] = _Loading(slots, keys[len(ready) :][: len(slots)], parent, found)
            usable, layers = self._faults.load_usable(op, len(slots), self.layout.layers)
            for layer in range(min(layers, self.layout.layers)):
                self._fabric.post((self.name, op), lambda layer=layer: self._load_layer(op, layer))  # type: ignore[misc]
            self._fabric.post((self.name, op), lambda: self._end_load(op, usable))

    def _find(self, key: bytes) -> tuple[str, bytes] | None:
        if key in self._ssd:
            return "ssd", self._ssd[key]
        for port in self._fabric.ports:
            slot = port.pool.get(key) if port is not self and not port.lost else None
            if slot is not None:
                return "peer", bytes(port._block(slot))
        return None

    def _load_layer(self, op: int, layer: int) -> None:
        load = self._loads.get(op)
        if load is None or load.cancelled:
            return
        size = self.layout.layer_block_bytes
        for slot, (_, data) in zip(load.slots, load.blocks, strict=True):
            self._block(slot)[layer * size : (layer + 1) * size] = data[layer * size : (layer + 1) * size]
        self._sink(LayersReady(op=op, layers=layer + 1))

    def _end_load(self, op: int, usable: int) -> None:
        load = self._loads.pop(op, None)
        if load is None:
            return
        if load.cancelled:
            usable = 0
        parent = load.parent
        for index, (slot, key) in enumerate(zip(load.slots, load.keys, strict=True)):
            if index < usable:
                self._block(slot)[:] = load.blocks[index][1]
                self.pool.commit(slot, key, parent)
                parent = key
            else:
                self._poison(slot)
        short = usable < len(load.slots)
        reason = (load.cancelled or "read failed") if short else ""
        self._sink(LoadEnded(op=op, usable=usable, tiers=[tier for tier, _ in load.blocks[:usable]], reason=reason))

    def cancel_load(self, op: int) -> None:
        load = self._loads.get(op)
        if load is not None:
            load.cancelled = "cancelled"
        self._pump()

    # --- slots -------------------------------------------------------------------------------------------------

    def reserve(self, op: int, count: int) -> None:
        self._fabric.post((self.name, op), lambda: self._answer_reserve(op, count))
        self._pump()

    def _answer_reserve(self, op: int, count: int) -> None:
        if self.lost:
            self._held_reserves.append((op, count))
            return
        refused = self._faults.refuse_reserve(op, count)
        self._sink(Reserved(op=op, slots=[] if refused else self._reserve(count) or []))

    def _reserve(self, count: int) -> list[int] | None:
        slots = self.pool.reserve(count)
        for evicted in self.pool.drain_evicted():
            if self._ssd_blocks:
                self._ssd[evicted.key] = bytes(self._block(evicted.slot))
                if len(self._ssd) > self._ssd_blocks:
                    del self._ssd[next(iter(self._ssd))]
        for slot in slots or ():
            self._poison(slot)
        return slots

    def commit(self, blocks: Sequence[Filled], *, tenant: str) -> None:
        with self._fabric.lock:
            for block in blocks:
                if not self.lost:
                    self.pool.commit(block.slot, block.key, block.parent)

    def free(self, slots: Sequence[int]) -> None:
        with self._fabric.lock:
            for slot in slots:
                if self._stolen.get(slot):
                    self._stolen[slot] -= 1
                elif self.pool.unref(slot):
                    self._poison(slot)

    # --- hand-offs ---------------------------------------------------------------------------------------------

    def open_inbound(self, handoff: str, slots: Sequence[int], *, first: int, deadline_s: float) -> None:
        secret = handoff.encode()[-8:]
        with self._fabric.lock:
            if self.lost:
                self.emit(handoff, InboundEnded(handoff=handoff, reason="node lost"))
            else:
                self._fabric.inbound[handoff] = Inbound(self, slots, first, secret)
                ticket = Ticket(
                    handoff=handoff,
                    secret=secret,
                    address=Address(self.name, 0),
                    first=first,
                    blocks=len(slots),
                    layers=self.layout.layers,
                    deadline_s=deadline_s,
                )
                self.emit(handoff, InboundOpened(handoff=handoff, ticket=ticket))
        self._pump()

    def open_outbound(self, handoff: str, ticket: Ticket) -> None:
        with self._fabric.lock:
            self._fabric.outbound[handoff] = Outbound(self, ticket.secret)
            if self.lost or handoff not in self._fabric.inbound:
                self._fabric.fail(handoff, "peer lost", "stale ticket")
        self._pump()

    def push_layer(self, handoff: str, layer: int, blocks: Sequence[tuple[int, int]]) -> None:
        self._fabric.post(handoff, lambda: self._deliver(handoff, layer, list(blocks)))
        self._pump()

    def _deliver(self, handoff: str, layer: int, blocks: list[tuple[int, int]]) -> None:
        inbound, outbound = self._fabric.inbound.get(handoff), self._fabric.outbound.get(handoff)
        if inbound is None or outbound is None:
            return
        if self._faults.break_push(handoff, layer):
            self._fabric.fail(handoff, "connection broken", "connection broken")
            return
        size = self.layout.layer_block_bytes
        span = slice(layer * size, (layer + 1) * size)
        for slot, index in blocks:
            if (layer, index) not in inbound.missing:
                raise InvariantBroken(f"{handoff}: layer {layer} of block {index} pushed twice or not expected")
            inbound.missing.discard((layer, index))
            target = inbound.slots[index - inbound.first]
            inbound.port._block(target)[span] = self._block(slot)[span]
            self.pushed.append((handoff, layer, index))

    def finish_outbound(self, handoff: str) -> None:
        self._fabric.post(handoff, lambda: self._finish(handoff))
        self._pump()

    def _finish(self, handoff: str) -> None:
        inbound = self._fabric.inbound.get(handoff)
        if inbound is not None and inbound.missing:
            raise InvariantBroken(f"{handoff}: finished with {len(inbound.missing)} Layer Blocks missing")
        self._fabric.fail(handoff, "", "")

    def abandon(self, handoff: str) -> None:
        with self._fabric.lock:
            inbound = self._fabric.inbound.get(handoff)
            mine = inbound is not None and inbound.port is self
            reasons = ("abandoned", "peer abandoned") if mine else ("peer abandoned", "abandoned")
            self._fabric.fail(handoff, *reasons)
        self._pump()

    # --- faults ------------------------------------------------------------------------------------------------

    def lose(self, reason: str = "node lost") -> None:
        """The node dies: everything outstanding ends as a miss or a failure, then PortLost."""
        self.lost = True
        for op in sorted(self._lookups):
            self._sink(Acquired(op=op, ready=[], loading=[]))
        self._lookups.clear()
        for op, load in list(self._loads.items()):
            load.cancelled = reason
            self._end_load(op, 0)
        for handoff, inbound in list(self._fabric.inbound.items()):
            outbound = self._fabric.outbound.get(handoff)
            if inbound.port is self or (outbound is not None and outbound.port is self):
                self._fabric.fail(handoff, reason, reason)
        self._sink(PortLost(reason))
        self._pump()

    def come_back(self, lost: Sequence[int] = ()) -> None:
        """The node is back: PortBack, then the reservations that waited. The `lost` slots now belong to somebody else,
        who writes to them, until `release_lost`."""
        self.lost = False
        for slot in lost:
            self._stolen[slot] = self.pool.refs(slot)
            self._poison(slot)
        self._sink(PortBack(list(lost)))
        held, self._held_reserves = self._held_reserves, []
        for op, count in held:
            self._answer_reserve(op, count)
        self._pump()

    def release_lost(self) -> None:
        """The other owner of the lost slots lets go of them."""
        stolen, self._stolen = self._stolen, {}
        for slot in stolen:
            self.pool.unref(slot, self.pool.refs(slot))
            self._poison(slot)

    @property
    def private(self) -> list[int]:
        """Slots that engines hold and nobody has published."""
        return [slot for slot in range(self.total_slots) if self.pool.refs(slot) and self.pool.key(slot) is None]

    def forget_cache(self) -> None:
        """Drop every block that nobody uses, SSD included."""
        slots = self.pool.reserve(self.pool.free + self.pool.evictable) or []
        self.pool.drain_evicted()
        self._ssd.clear()
        self.free(slots)

    @property
    def referenced(self) -> int:
        """Slots that somebody holds; 0 when idle."""
        return self.total_slots - self.pool.free - self.pool.evictable

    def emit(self, channel: object, event: PortEvent) -> None:
        self._fabric.post(("event", self.name, channel), lambda: self._sink(event))

    def close(self) -> None:
        if self in self._fabric.ports:
            self._fabric.ports.remove(self)

    def _block(self, slot: int) -> memoryview:
        size = self.layout.full_block_bytes
        return memoryview(self._memory)[slot * size : (slot + 1) * size]

    def _poison(self, slot: int) -> None:
        self._block(slot)[:] = bytes((POISON,)) * self.layout.full_block_bytes

    def _pump(self) -> None:
        if self._eager:
            self._fabric.pump()
