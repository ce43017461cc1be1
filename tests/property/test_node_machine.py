"""A node's brain under random engines, disks, peers and timing: what an engine may read is always what it asked for,
nothing is written into a slot that somebody else got, and in the end everything is free again.

The machine stands in for the edge: it carries out actions in any order, late, badly or not at all, on an arena of
names instead of bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from anabranch.blocks.layout import KvLayout
from anabranch.paging.pool import SlotPool
from anabranch.store import actions as a
from anabranch.store import messages as m
from anabranch.store.config import NodeConfig
from anabranch.store.node import ArenaName, Node
from anabranch.store.slots import Named, SlotBook
from anabranch.store.ssd_index import SsdEntry, SsdIndex
from anabranch.testing.store import chain
from anabranch.transfer.api import Address
from anabranch.transfer.layouts import tenant_digest
from anabranch.transfer.records import AttachedSession, SlotRecord

SLOTS, SSD_SLOTS, LAYERS = 10, 6, 2
LAYOUT = KvLayout(layers=LAYERS, kv_heads=1, head_dim=1, block_tokens=1)
PROMPTS = [chain(name, 5) for name in ("p", "q")]
PROMPTS.append(PROMPTS[0][:2] + chain("r", 3))
TENANT = tenant_digest("t")


class Engine:
    def __init__(self, name: bytes) -> None:
        self.name = name
        self.held: Counter[int] = Counter()
        self.expect: dict[int, bytes] = {}
        self.wants: dict[int, list[bytes]] = {}
        self.loading: dict[int, tuple[list[int], list[bytes]]] = {}
        self.private: list[int] = []
        self.inbound: dict[str, list[int]] = {}


class NodeMachine(RuleBasedStateMachine):
    engines = Bundle("engines")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ids = 0
        self.memory: list[bytes] = [b""] * SLOTS
        self.disk: dict[int, tuple[Any, bytes]] = {}
        self.records: dict[int, SlotRecord] = {}
        self.tasks: list[Any] = []
        self.open: dict[Any, list[int]] = {}
        self.live: dict[bytes, Engine] = {}
        self.serving: dict[int, a.ServeFetch] = {}
        for slot, key in enumerate(PROMPTS[0][:4]):
            parent = PROMPTS[0][slot - 1] if slot else b""
            self.disk[slot] = (Named(key, parent, TENANT, 1), key)
        self.boot([])

    def boot(self, sessions: list[AttachedSession]) -> None:
        counters: Counter[str] = Counter()
        index = SsdIndex(SlotPool(SSD_SLOTS), counters)
        index.recover([SsdEntry(slot, slot, named) for slot, (named, _) in self.disk.items()])
        self.node = Node(
            "n",
            LAYOUT,
            NodeConfig(),
            ArenaName("arena", 1, 1),
            Address("h", 1),
            SlotBook(SlotPool(SLOTS), SLOTS, counters),
            index,
            counters,
            lambda: b"s" * 16,
        )
        self.tasks, self.open, self.serving = [], {}, {}
        good = {
            slot: r if r.key == self.memory[slot] else msgspec.structs.replace(r, block_sum=0)
            for slot, r in self.records.items()
            if r.state
        }
        self.step(a.Recovered(good, sessions))
        self.step(a.DirectoryUp())

    # --- the edge -----------------------------------------------------------------------------------------------

    def step(self, event: Any) -> None:
        actions = self.node.handle(event, self.now)
        self.records.update(self.node.take_records())
        for action in actions:
            self.act(action)

    def act(self, action: Any) -> None:
        match action:
            case a.Tell(session=session, message=message):
                if session in self.live:
                    self.hear(self.live[session], message)
            case a.ReadSsd() | a.FetchPeer():
                self.open[action.load, action.segment] = action.slots
                self.tasks.append(action)
            case a.StopSegment(load=load, segment=segment):
                if (load, segment) in self.open:
                    slots = self.open.pop((load, segment))
                    self.step(a.SegmentEnded(load, segment, [None] * len(slots), "stopped"))
            case a.OpenSink(handoff=handoff, slots=slots):
                self.open[handoff] = slots
            case a.CloseSink(handoff=handoff, reason=reason):
                if self.open.pop(handoff, None) is not None:
                    self.step(a.InboundDone(handoff, reason))
            case a.Seal() | a.WriteSsd() | a.EndPush():
                self.tasks.append(action)
            case a.ServeFetch():
                self.serving[action.fetch] = action
            case a.SendDirectory(message=m.Lookup(op=op, keys=keys)):
                self.tasks.append((op, keys))

    def hear(self, engine: Engine, message: Any) -> None:
        match message:
            case m.AcquiredReply(op=op, ready=ready, loading=loading):
                keys = engine.wants.pop(op)
                engine.held.update(ready + loading)
                engine.expect.update(zip(ready, keys, strict=False))
                if loading:
                    engine.loading[op] = (loading, keys[len(ready) :])
            case m.LoadEndedReply(op=op, usable=usable):
                slots, keys = engine.loading.pop(op)
                engine.expect.update(zip(slots[:usable], keys, strict=False))
                engine.private += slots[usable:]
                for slot in slots[usable:]:
                    self.memory[slot] = b"mine" + engine.name
                    engine.expect[slot] = self.memory[slot]
            case m.ReservedReply(slots=slots):
                for slot in slots:
                    assert not any(other.held[slot] for other in self.live.values())
                    engine.held[slot] += 1
                    engine.private.append(slot)
                    self.memory[slot] = b"mine" + engine.name
                    engine.expect[slot] = self.memory[slot]
            case m.InboundEndedReply(handoff=handoff):
                for slot in engine.inbound.pop(handoff, []):
                    engine.private.append(slot)
                    self.memory[slot] = b"mine" + engine.name
                    engine.expect[slot] = self.memory[slot]

    @rule(picks=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([True, True, True, False])), min_size=1))
    def carry_out(self, picks: list[tuple[int, bool]]) -> None:
        for pick, good in picks:
            if self.tasks:
                self.carry_out_one(pick, good)

    def carry_out_one(self, pick: int, good: bool) -> None:
        task = self.tasks.pop(pick % len(self.tasks))
        match task:
            case a.ReadSsd(load=load, segment=segment, slots=slots, blocks=blocks, ssd_slots=ssd_slots):
                if (load, segment) in self.open:
                    sums = []
                    for slot, block, ssd_slot in zip(slots, blocks, ssd_slots, strict=True):
                        self.memory[slot] = self.disk[ssd_slot][1] if good else b"garbage"
                        sums.append(1 if good and self.memory[slot] == block.key else None)
                    corrupt = [i for i, value in enumerate(sums) if value is None]
                    del self.open[load, segment]
                    self.step(a.SegmentEnded(load, segment, sums, "" if good else "bad", corrupt))
                self.step(a.SsdReleased(ssd_slots))
            case a.FetchPeer(load=load, segment=segment, slots=slots, keys=keys):
                if (load, segment) in self.open:
                    del self.open[load, segment]
                    arrived = len(slots) if good else len(slots) // 2
                    for slot, key in zip(slots[:arrived], keys, strict=False):
                        self.memory[slot] = key
                    sums = [1 if i < arrived else None for i in range(len(slots))]
                    self.step(a.SegmentEnded(load, segment, sums, "" if good else "peer died"))
            case a.Seal(slot=slot, key=key, resident=resident):
                conflict = resident is not None and self.memory[slot] != self.memory[resident]
                self.step(a.Sealed(slot, key, 1, resident, conflict))
            case a.WriteSsd(slot=slot, ssd_slot=ssd_slot, block=block):
                if good:
                    self.disk[ssd_slot] = (block, self.memory[slot])
                self.step(a.SsdWritten(slot, ssd_slot, block, "" if good else "full", SSD_SLOTS // 2))
            case a.EndPush(handoff=handoff, reason=reason):
                self.step(a.OutboundDone(handoff, reason))
            case (op, keys):
                holdings = [m.Holding("peer", "p:1", [(0, len(keys) if good else 1, "dram")])]
                self.step(a.DirectoryMessage(m.Holders(op=op, holdings=holdings)))

    # --- engines ------------------------------------------------------------------------------------------------

    @initialize(target=engines)
    def first(self) -> bytes:
        return self.attach_one()

    @rule(target=engines)
    def attach(self) -> bytes:
        return self.attach_one()

    def attach_one(self) -> bytes:
        self.ids += 1
        name = self.ids.to_bytes(16, "big")
        self.live[name] = Engine(name)
        self.step(a.PortAttached(AttachedSession(1, 1, name), {}))
        return name

    def say(self, name: bytes, message: Any) -> None:
        if name in self.live:
            self.step(a.PortMessage(name, message))

    @rule(name=engines, prompt=st.sampled_from(PROMPTS), load=st.sampled_from([True, True, True, False]))
    def acquire(self, name: bytes, prompt: list[bytes], load: bool) -> None:
        if name in self.live:
            self.ids += 1
            self.live[name].wants[self.ids] = prompt
            self.say(name, m.Acquire(op=self.ids, keys=prompt, tenant="t", load=load, deadline_s=3.0))

    @rule(name=engines, count=st.integers(0, 5))
    def reserve(self, name: bytes, count: int) -> None:
        self.ids += 1
        self.say(name, m.Reserve(op=self.ids, count=count))

    @rule(name=engines, prompt=st.sampled_from(PROMPTS), at=st.integers(0, 4))
    def commit(self, name: bytes, prompt: list[bytes], at: int) -> None:
        engine = self.live.get(name)
        if engine is None or not engine.private:
            return
        slot = engine.private.pop()
        self.memory[slot] = prompt[at]
        engine.expect[slot] = prompt[at]
        self.say(name, m.Commit(blocks=[(slot, prompt[at], prompt[at - 1] if at else b"")], tenant="t"))

    @rule(name=engines, pick=st.integers(0, 99))
    def free(self, name: bytes, pick: int) -> None:
        engine = self.live.get(name)
        busy = {s for slots, _ in engine.loading.values() for s in slots} if engine else set()
        busy |= {s for slots in engine.inbound.values() for s in slots} if engine else set()
        free = sorted(slot for slot in (engine.held if engine else []) if slot not in busy)
        if engine is None or not free:
            return
        slot = free[pick % len(free)]
        engine.held[slot] -= 1
        if not engine.held[slot]:
            del engine.held[slot]
            engine.expect.pop(slot, None)
            engine.private = [s for s in engine.private if s != slot]
        self.say(name, m.Free(slots=[slot]))

    @rule(name=engines)
    def open_inbound(self, name: bytes) -> None:
        engine = self.live.get(name)
        if engine is not None and engine.private:
            self.ids += 1
            slots, engine.private = engine.private[:2], engine.private[2:]
            engine.inbound[str(self.ids)] = slots
            for slot in slots:
                engine.expect.pop(slot, None)
            self.say(name, m.OpenInbound(handoff=str(self.ids), slots=slots, first=0, deadline_s=3.0))

    @rule(name=engines, done=st.booleans())
    def end_inbound(self, name: bytes, done: bool) -> None:
        engine = self.live.get(name)
        for handoff in list(engine.inbound) if engine else []:
            if done and self.open.pop(handoff, None) is not None:
                self.step(a.InboundDone(handoff))
            else:
                self.say(name, m.Abandon(handoff=handoff))

    @rule(name=engines)
    def cancel_loads(self, name: bytes) -> None:
        engine = self.live.get(name)
        for op in [*engine.loading, *engine.wants] if engine else []:
            self.say(name, m.CancelLoad(op=op))

    @rule(name=engines)
    def die(self, name: bytes) -> None:
        if self.live.pop(name, None) is not None:
            self.step(a.SessionGone(name))

    # --- peers, time, restarts ----------------------------------------------------------------------------------

    @rule(prompt=st.sampled_from(PROMPTS))
    def peer_asks(self, prompt: list[bytes]) -> None:
        self.ids += 1
        self.step(a.FetchAsked(self.ids, prompt, TENANT, 2.0))

    @rule()
    def peer_is_served(self) -> None:
        for fetch, action in list(self.serving.items()):
            del self.serving[fetch]
            for slot, generation in zip(action.slots, action.generations, strict=True):
                if self.records[slot].generation == generation:
                    assert self.memory[slot] == self.records[slot].key
            self.step(a.FetchServed(fetch))

    @rule()
    def directory_restarts(self) -> None:
        self.step(a.DirectoryDown())
        self.step(a.DirectoryUp())

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.step(a.Tick())

    @rule()
    def crash(self) -> None:
        """The node process is killed; engines live on and come back with what they hold."""
        self.boot([AttachedSession(1, 1, name) for name in self.live])
        for engine in self.live.values():
            for slots, _ in engine.loading.values():
                engine.private += slots
            engine.private += [slot for slots in engine.inbound.values() for slot in slots]
            engine.wants, engine.loading, engine.inbound = {}, {}, {}
            for slot in engine.private:
                self.memory[slot] = engine.expect[slot] = b"mine" + engine.name
        for engine in list(self.live.values()):
            held, engine.held = dict(engine.held), engine.held
            lost: list[int] = []

            def hear(message: Any, lost: list[int] = lost) -> None:
                lost += message.lost

            tells = self.node.handle(a.PortAttached(AttachedSession(1, 1, engine.name), held), self.now)
            self.records.update(self.node.take_records())
            for action in tells:
                if isinstance(action, a.Tell):
                    hear(action.message)
                else:
                    self.act(action)
            assert lost == []

    @invariant()
    def engines_read_what_they_asked_for(self) -> None:
        for engine in self.live.values():
            for slot, content in engine.expect.items():
                assert self.memory[slot] == content

    @invariant()
    def the_books_add_up(self) -> None:
        self.node.book.pool.check()
        assert self.node.ssd is not None
        self.node.ssd.pool.check()
        for slot, block in self.node.book.named.items():
            assert self.memory[slot] == block.key

    def teardown(self) -> None:
        for name in list(self.live):
            self.live.pop(name)
            self.step(a.SessionGone(name))
        self.peer_is_served()
        self.carry_out([(0, True)] * 200)
        self.now += 100.0
        self.step(a.Tick())
        self.carry_out([(0, True)] * 200)
        self.peer_is_served()
        census = self.node.census()
        assert census["free_slots"] + census["evictable_slots"] == SLOTS, census
        for name in (
            "private_slots",
            "held_references",
            "loads",
            "lookups",
            "fetch_leases",
            "inbound",
            "writes_queued",
        ):
            assert census[name] == 0, census
        index = self.node.ssd
        assert index is not None
        assert index.pool.free + index.pool.evictable + len(index.withheld) == SSD_SLOTS


NodeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestNode = NodeMachine.TestCase
