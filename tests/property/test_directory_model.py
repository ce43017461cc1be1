"""The directory against a naive model: after any history of announcements, losses and repairs, it says exactly what a
node holds, or nothing about it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from anabranch.store.actions import SendDirectory
from anabranch.store.announcer import Announcer
from anabranch.store.directory import Directory
from anabranch.store.messages import Join, Lookup, Resync
from anabranch.store.slots import Changes
from anabranch.testing.store import chain

NODES = ("a", "b")
KEYS = chain("p", 6)
LAYOUT = b"L" * 16
TIERS = st.sampled_from(["dram", "ssd"])


class DirectoryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.directory = Directory(2.0, 0.0)
        self.held: dict[str, dict[str, set[bytes]]] = {n: {"dram": set(), "ssd": set()} for n in NODES}
        self.doubtful: set[str] = set()
        self.wires: dict[str, list[SendDirectory]] = {n: [] for n in NODES}
        self.announcers = {n: Announcer(n, f"{n}:1", LAYOUT, 0.5, self.wires[n].append) for n in NODES}
        for name in NODES:
            self.reconnect(name)

    def reconnect(self, name: str) -> None:
        self.directory.handle(name, Join(node_id=name, epoch=0, address=f"{name}:1", layout=LAYOUT), self.now)
        self.wires[name].clear()
        self.reset(name)
        self.deliver(name)

    def reset(self, name: str) -> None:
        self.doubtful.discard(name)
        self.announcers[name].reset({tier: sorted(keys) for tier, keys in self.held[name].items()}, self.now)

    def deliver(self, name: str) -> None:
        wire = self.wires[name]
        while wire:
            for reply in self.directory.handle(name, wire.pop(0).message, self.now):
                assert isinstance(reply, Resync)
                self.reset(name)

    @rule(name=st.sampled_from(NODES), tier=TIERS, at=st.integers(0, 5), lost=st.booleans())
    def toggle(self, name: str, tier: str, at: int, lost: bool) -> None:
        keys, key = self.held[name][tier], KEYS[at]
        changes = Changes(added={}, removed={})
        if key in keys:
            keys.discard(key)
            changes.remove(key)
        else:
            keys.add(key)
            changes.add(key)
        self.announcers[name].changed(tier, changes)
        self.announcers[name].flush(self.now)
        if lost:
            self.doubtful.add(name)
            self.wires[name].clear()
        self.deliver(name)

    @rule(seconds=st.sampled_from([0.1, 0.6, 1.1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name in NODES:
            self.announcers[name].flush(self.now)
            self.deliver(name)

    @rule(name=st.sampled_from(NODES))
    def break_connection(self, name: str) -> None:
        self.directory.gone(name)
        self.reconnect(name)

    @rule()
    def restart(self) -> None:
        self.directory = Directory(2.0, self.now)
        for name in NODES:
            self.reconnect(name)

    @rule()
    def settle(self) -> None:
        """Two heartbeats with nothing lost repair everything."""
        for _ in range(2):
            self.now += 1.0
            for name in NODES:
                self.announcers[name].flush(self.now)
                self.deliver(name)
        self.compare(NODES)

    @invariant()
    def what_is_said_of_a_node_that_lost_nothing_is_exact(self) -> None:
        self.compare(tuple(name for name in NODES if name not in self.doubtful))

    def compare(self, exact: tuple[str, ...]) -> None:
        found = self.directory.lookup("z", Lookup(op=1, keys=KEYS, layout=LAYOUT), self.now)
        said = {
            h.node_id: {i for first, count, _ in h.runs for i in range(first, first + count)} for h in found.holdings
        }
        holds = {
            name: {i for i, key in enumerate(KEYS) if any(key in keys for keys in self.held[name].values())}
            for name in exact
        }
        union = set().union(*holds.values())
        reach = next((i for i in range(len(KEYS)) if i not in union), len(KEYS))
        for name in exact:
            # A node in doubt may make the directory look further, or less far.
            assert said.get(name, set()) <= holds[name]
            if len(exact) == len(NODES):
                assert said.get(name, set()) == holds[name] & set(range(reach))


DirectoryMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDirectory = DirectoryMachine.TestCase
