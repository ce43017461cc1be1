"""Value nodes, their losses and returns: nobody is named for what it does not hold, and "absent" is never said of what
some node holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from anabranch.core.messages import Message
from anabranch.store.directory import Directory
from anabranch.store.messages import Heartbeat, Join, Places, Repair, Resync, Where
from anabranch.store.outbox import Holdings, Outbox
from anabranch.store.shards import Whereabouts
from anabranch.store.values.live.key_table import make_key_table
from anabranch.testing.store import chain

NODES = ("a", "b", "c")
NAMES = chain("w", 6)
PACKED = b"".join(NAMES)
TTL_S = 2.0
TIERS = st.sampled_from(["dram", "ssd"])


class ValueNode:
    def __init__(self, name: str) -> None:
        self.name = name
        self.held: dict[str, set[bytes]] = {"dram": set(), "ssd": set()}
        self.outbox = Outbox(0, 1)
        self.lives = 0
        self.connected = False
        self.heard = 0.0
        self.wire: list[Message] = []

    @property
    def connection(self) -> str:
        return f"{self.name}{self.lives}"

    def holds(self, name: bytes) -> bool:
        return any(name in names for names in self.held.values())

    def reset(self) -> None:
        self.outbox.clear()
        self.wire += self.outbox.reset(Holdings({tier: b"".join(sorted(names)) for tier, names in self.held.items()}))


class WhereMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.directory = Directory(TTL_S, 0.0, make_key_table)
        self.nodes = {name: ValueNode(name) for name in NODES}
        for node in self.nodes.values():
            self.connect(node)
            self.deliver(node, 99)

    def connect(self, node: ValueNode) -> None:
        node.lives += 1
        node.connected = True
        node.wire = [Join(node_id=node.name, epoch=1, address=f"{node.name}:1", layout=b"", replicas=2)]
        node.reset()

    def deliver(self, node: ValueNode, count: int) -> None:
        while node.connected and node.wire and count:
            count -= 1
            node.heard = self.now
            for reply in self.directory.handle(node.connection, node.wire.pop(0), self.now):
                assert isinstance(reply, Resync)
                node.reset()

    def beat(self) -> None:
        for node in self.nodes.values():
            if node.connected:
                node.wire.append(Heartbeat(seq=node.outbox.seq, free_bytes=1, total_bytes=2))
                self.deliver(node, 99)

    @rule(name=st.sampled_from(NODES), tier=TIERS, at=st.integers(0, 5), count=st.integers(0, 3))
    def change(self, name: str, tier: str, at: int, count: int) -> None:
        node, key = self.nodes[name], NAMES[at]
        if key in node.held[tier]:
            node.held[tier].discard(key)
            node.outbox.changed({}, {tier: key}, {})
        else:
            node.held[tier].add(key)
            node.outbox.changed({tier: key}, {}, {3: key} if at == 5 else {})
        if node.connected:
            node.wire += node.outbox.take()
            self.deliver(node, count)

    @rule(name=st.sampled_from(NODES), forgets=st.booleans())
    def die(self, name: str, forgets: bool) -> None:
        node = self.nodes[name]
        if node.connected:
            node.connected = False
            self.directory.gone(node.connection, self.now)
        if forgets:
            node.held["dram"].clear()

    @rule(name=st.sampled_from(NODES), count=st.integers(0, 4), closed=st.booleans())
    def come_back(self, name: str, count: int, closed: bool) -> None:
        """Perhaps before the directory notices that the old connection is gone."""
        node = self.nodes[name]
        old = node.connection
        self.connect(node)
        self.deliver(node, count)
        if closed:
            self.directory.gone(old, self.now)

    @rule(name=st.sampled_from(NODES), count=st.integers(1, 99))
    def arrive(self, name: str, count: int) -> None:
        self.deliver(self.nodes[name], count)

    @rule(seconds=st.sampled_from([0.1, 0.9, 2.1]), beat=st.booleans(), steps=st.integers(0, 40))
    def wait(self, seconds: float, beat: bool, steps: int) -> None:
        self.now += seconds
        if beat:
            self.beat()
        for _ in range(steps):
            hints, more = self.directory.tick(self.now)
            assert all(isinstance(hint, Repair) for _, hint in hints)
            if not more:
                break

    @rule()
    def settle(self) -> None:
        """All nodes are back and everything arrives: answers are exact and certain."""
        for node in self.nodes.values():
            if not node.connected:
                self.connect(node)
        for _ in range(2):
            self.now += 1.5
            self.beat()
            while self.directory.tick(self.now)[1]:
                pass
        found = self.where()
        assert found.known() == [any(node.holds(key) for node in self.nodes.values()) for key in NAMES]
        for i, key in enumerate(NAMES):
            assert {holder for holder, _, _ in found.holders(i)} == {
                n.name for n in self.nodes.values() if n.holds(key)
            }

    def where(self) -> Whereabouts:
        (places,) = self.directory.handle("asker", Where(op=1, names=PACKED), self.now)
        assert isinstance(places, Places)
        return Whereabouts(places.places, places.members, places.unknown)

    @invariant()
    def nothing_is_absent_that_somebody_announced(self) -> None:
        found = self.where()
        told = [n for n in self.nodes.values() if n.connected and not n.wire and self.now - n.heard <= 2 * TTL_S]
        for i, known in enumerate(found.known()):
            if known is False:
                # Who is gone, or silent, for long is given up.
                assert not any(node.holds(NAMES[i]) for node in told)
            for holder, _, _ in found.holders(i):
                assert self.nodes[holder].holds(NAMES[i]) or self.nodes[holder].wire


WhereMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestWhere = WhereMachine.TestCase
