"""Several value nodes and their directory: copies, repair, removal and invalidation everywhere, leaving."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from value_lanes import MIB, Caller, NodeRig, arena_path, name, until

from anabranch.core.authentication import Credentials
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.messages import Drain, Exists, Invalidate, Pin, Prefetch, Remove
from anabranch.store.values.outcome import Outcome

OK, MISSING = Outcome.OK, Outcome.MISSING


class Store:
    """A directory and nodes `n0`, `n1`, …"""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = DirectoryServer(DirectoryConfig(listen="127.0.0.1:0", node_ttl_s=0.5)).start()
        self.link = DirectoryLink(self.directory.address)
        self.rigs: list[NodeRig] = []
        self.callers: list[Caller] = []

    def add(self, *, dram: int = 32 * MIB, replicas: int = 1) -> Caller:
        number = len(self.rigs)
        config = StoreConfig(
            dram_bytes=dram, listen="127.0.0.1:0", directory=self.directory.address, heartbeat_s=0.05, eviction="lru"
        )
        folder = self.folder / str(number)
        folder.mkdir()
        writes = WriteConfig(replicas=replicas)
        rig = NodeRig(folder, arena_path(f"n{number}"), config, node_id=f"n{number}", writes=writes)
        self.rigs.append(rig)
        until(lambda: rig.node.joined, "the node joins")
        until(lambda: any(row.node_id == f"n{number}" for row in self.link.nodes()), "the directory knows the node")
        self.callers.append(Caller(rig.node.address))
        return self.callers[-1]

    def holders(self, one: bytes) -> set[str]:
        return {node for node, _, _ in self.link.where(one).holders(0)}

    def here(self, number: int, names: list[bytes]) -> int:
        return sum(map(bool, self.callers[number].ask(Exists(op=1, names=b"".join(names))).tiers))

    def close(self) -> None:
        for caller in self.callers:
            caller.close()
        for rig in self.rigs:
            rig.node.stop()
        self.link.close()
        self.directory.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path)
    yield store
    store.close()


def test_the_directory_hears_what_comes_and_goes(store: Store) -> None:
    caller = store.add()
    one, other = name(), name()
    caller.put([one, other], [b"a", bytes(MIB - 1)])
    until(lambda: store.holders(one) == {"n0"} == store.holders(other), "both are announced")
    caller.ask(Remove(op=1, names=one))
    until(lambda: store.holders(one) == set(), "the removal is announced")
    for _ in range(33):
        caller.put([name()], [bytes(MIB)])
    until(lambda: store.holders(other) == set(), "the eviction is announced")


def test_replicas_are_there_before_the_answer(store: Store) -> None:
    first = store.add(replicas=2)
    store.add()
    store.add()
    small = [name() for _ in range(20)]
    assert first.put(small, [os.urandom(1000)] * 20) == [OK] * 20
    assert store.here(0, small) == 20
    assert store.here(1, small) + store.here(2, small) == 20
    assert store.here(1, small) > 0 < store.here(2, small), "not all go to one node"
    large, value = name(), os.urandom(3 * MIB + 5)
    assert first.put_large([large], [value], replicas=3) == [OK]
    assert [caller.get_large(large) for caller in store.callers] == [value] * 3
    assert first.put([single := name()], [b"one"], replicas=1) == [OK]
    assert [store.here(i, [single]) for i in range(3)] == [1, 0, 0]
    assert store.rigs[0].counter("replicas_stored") == 22
    assert store.rigs[1].counter("replicas_stored") == 0, "a copy is not copied again"


def test_fewer_nodes_than_replicas_is_no_error(store: Store) -> None:
    caller = store.add()
    assert caller.put([name()], [b"x"], replicas=3) == [OK]
    assert store.rigs[0].counter("replicas_short") == 2


def test_what_a_lost_node_had_is_copied_again(store: Store) -> None:
    first = store.add(replicas=2)
    store.add(replicas=2)
    names = [name() for _ in range(30)]
    first.put(names, [os.urandom(500)] * 30)
    until(lambda: store.holders(names[-1]) == {"n0", "n1"}, "two holders are known")
    store.add(replicas=2)
    assert store.here(2, names) == 0
    store.callers[1].close()
    store.rigs[1].node.stop()
    until(lambda: store.here(2, names) == 30, "the third node got copies")
    until(lambda: store.rigs[0].counter("repaired") == 30, "they are counted")
    store.rigs[1].again()


def test_remove_reaches_every_node(store: Store) -> None:
    callers = [store.add(replicas=2) for _ in range(3)]
    names = [name() for _ in range(10)]
    callers[0].put(names, [b"x" * 100] * 10)
    until(lambda: all(len(store.holders(one)) == 2 for one in names), "two holders each")
    assert callers[2].ask(Remove(op=1, names=b"".join([*names, name()]))).outcomes == bytes([OK] * 10 + [MISSING])
    assert [store.here(i, names) for i in range(3)] == [0, 0, 0]


def test_a_removal_reaches_copies_that_nobody_has_heard_of(store: Store) -> None:
    """A copy is announced some milliseconds after it was made; a removal may be faster."""
    first, second, third = (store.add() for _ in range(3))
    for i in range(30):
        one = name()
        assert first.put([one], [bytes(10_000)], replicas=2) == [OK]
        if i % 2:
            third.ask(Prefetch(op=1, names=one))
        assert first.ask(Remove(op=1, names=one)).outcomes == bytes([OK])
        assert [caller.get([one]) for caller in (first, second)] == [[MISSING], [MISSING]]
        until(lambda: store.rigs[2].census()["imports"] == 0, "the import ends")
        assert third.get([one]) == [MISSING]


def test_invalidate_reaches_every_node(store: Store) -> None:
    callers = [store.add(replicas=2) for _ in range(2)]
    names = [name() for _ in range(10)]
    callers[0].put(names, [b"x" * 100] * 10)
    assert callers[1].ask(Invalidate(op=1)).places == {"n0/dram": 10, "n1/dram": 10}
    assert [store.here(i, names) for i in range(2)] == [0, 0]
    store.rigs[0].node.stop()
    until(lambda: len(store.link.nodes()) == 1, "the directory has lost the node")
    store.rigs[0].again()
    until(lambda: store.rigs[0].node.joined, "the node is back")


@pytest.mark.parametrize("what", ["remove", "epoch", "tenant", "forgotten"])
def test_a_node_that_was_away_does_not_bring_back_what_others_removed(store: Store, what: str) -> None:
    first, second = store.add(replicas=2), store.add(replicas=2)
    names, kept = [name() for _ in range(5)], name()
    first.put(names, [b"x" * 100] * 5)
    other = Caller(store.rigs[0].node.address, Credentials(tenant="other"))
    other.put([kept], [b"y"])
    until(lambda: os.path.getsize(store.rigs[0].folder / "data" / "joined") == 8, "it knows since when it is joined")
    first.close()
    other.close()
    store.rigs[0].node.stop(keep=True)
    until(lambda: len(store.link.nodes()) == 1, "the directory has lost the node")
    if what == "remove":
        assert second.ask(Remove(op=1, names=b"".join(names))).outcomes != bytes([MISSING] * 5)
    else:
        assert second.ask(Invalidate(op=1, epoch=None if what == "tenant" else "")).places["n1/dram"] == 5
    if what == "forgotten":
        with store.rigs[1].node._peers.missed._lock:
            store.rigs[1].node._peers.missed._file.log.dropped = time.time()
    node = store.rigs[0].again()
    again = store.callers[0] = Caller(node.address)
    other = Caller(node.address, Credentials(tenant="other"))
    assert store.here(0, names) == 0
    assert other.get([kept]) == [MISSING if what == "forgotten" else b"y"]
    other.close()
    assert again.put([names[0]], [b"new"]) == [OK]
    until(lambda: node.joined, "the node is back")
    node._peers.missed._catch_up_again(joins=True)
    if what != "forgotten":
        assert again.get([names[0]]) == [b"new"], "it was told once"


def test_a_node_alone_with_its_directory_away_serves_what_it_had(store: Store) -> None:
    first, one = store.add(), name()
    first.put([one], [b"x"])
    first.close()
    store.rigs[0].node.stop(keep=True)
    store.directory.stop()
    store.callers[0] = Caller(store.rigs[0].again().address)
    assert store.callers[0].get([one]) == [b"x"]


def test_prefetch_brings_values_of_other_nodes(store: Store) -> None:
    first, second = store.add(), store.add()
    names, values = [name() for _ in range(4)], [b"", b"small", os.urandom(MIB), os.urandom(2 * MIB + 9)]
    for one, value in zip(names, values, strict=True):
        first.put_large([one], [value])
    until(lambda: all(store.holders(one) for one in names), "all are announced")
    outcomes = second.ask(Prefetch(op=1, names=b"".join([*names, name()]))).outcomes
    assert outcomes == bytes([OK] * 4 + [MISSING])
    until(lambda: store.here(1, names) == 4, "all arrive")
    assert [second.get_large(one) for one in names] == values
    until(lambda: store.holders(names[3]) == {"n0", "n1"}, "the copy is announced")


def test_a_node_that_drains_hands_over_and_leaves(store: Store) -> None:
    first, second = store.add(), store.add()
    names, values = [name() for _ in range(5)], [os.urandom(100_000 + i) for i in range(5)]
    for one, value in zip(names, values, strict=True):
        first.put([one], [value])
    second.put([names[0]], [values[0]])
    first.ask(Pin(op=1, names=names[1], seconds=100))
    until(lambda: len(store.holders(names[0])) == 2, "the second holder is known")
    found = first.find([names[2]])
    done = first.ask(Drain(op=1, deadline_s=20.0))
    assert done.places == {"n0/handed_over": 4, "n0/left_behind": 0}
    assert first.put([name()], [b"new"]) == [Outcome.UNREACHABLE]
    assert first.get_large(names[3]) == values[3], "it still serves"
    assert [second.get_large(one) for one in names] == values
    until(lambda: {row.node_id for row in store.link.nodes()} == {"n1"}, "it has left")
    assert not store.rigs[0].node.drained.is_set(), "a reader has a lease"
    assert found.lease
    first.close()
    until(store.rigs[0].node.drained.is_set, "its readers are done")
