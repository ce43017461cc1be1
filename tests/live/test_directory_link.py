"""Nodes announce over real sockets, to one shard or several; whoever asks gets one answer."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from anabranch.core.errors import Unavailable
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_feed import AnnouncingNode
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.live.stat_client import ask_stat
from anabranch.store.messages import Join, Repair
from anabranch.store.outbox import Holdings
from anabranch.testing.store import chain

TTL_S = 0.5


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.01)


class Holder:
    """A node that holds what it is told to."""

    def __init__(self, name: str, addresses: str, held: list[bytes], replicas: int = 1, epoch: int = 1) -> None:
        self.tiers = {"dram": dict.fromkeys(held)}
        self.repairs: list[Repair] = []
        node = AnnouncingNode(
            Join(node_id=name, epoch=epoch, address=f"{name}:{epoch}", layout=b"", replicas=replicas),
            lambda: Holdings({tier: b"".join(names) for tier, names in self.tiers.items()}),
            lambda: (1 << 20, 1 << 20, True),
            self.repairs.append,
            heartbeat_s=0.1,
        )
        self.link = DirectoryLink(addresses, node)

    def drop(self, names: list[bytes]) -> None:
        for name in names:
            del self.tiers["dram"][name]
        self.link.announce(removed={"dram": b"".join(names)})

    def take(self, names: list[bytes]) -> None:
        self.tiers["dram"].update(dict.fromkeys(names))
        self.link.announce({"dram": b"".join(names)})

    def close(self) -> None:
        self.link.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, listen: str = "127.0.0.1:0") -> DirectoryServer:
    server = DirectoryServer(DirectoryConfig(listen=listen, node_ttl_s=TTL_S)).start()
    stack.callback(server.stop)
    return server


def test_a_second_node_of_the_same_name_is_told_and_joins_when_the_first_has_left(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    address = start(stack).address
    first = stack.enter_context(closing(Holder("a", address, chain("v", 3))))
    asker = stack.enter_context(closing(DirectoryLink(address)))
    until(lambda: first.link.joined, "the first joins")
    second = stack.enter_context(closing(Holder("a", address, [], epoch=2)))
    until(lambda: any("--name" in record.message for record in caplog.records), "the second says what to do")
    time.sleep(2 * TTL_S)  # for as long as it takes to forget a silent node, nothing may change
    assert [row.address for row in asker.nodes()] == ["a:1"]
    assert not second.link.joined
    first.close()
    until(lambda: [row.address for row in asker.nodes()] == ["a:2"], "the second takes over")
    until(lambda: second.link.joined, "and knows")
    said = [record.message for record in caplog.records]
    assert sum("--name" in message for message in said) == 1
    assert sum(message.startswith("node a at a:1 joins") for message in said) == 1
    assert sum(message.startswith("node a at a:1 leaves") for message in said) == 1


def test_a_node_says_when_its_directory_is_away_and_when_it_has_joined(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    def said(words: str, level: str) -> int:
        return sum(words in record.message and record.levelname == level for record in caplog.records)

    caplog.set_level("INFO")
    server = DirectoryServer(DirectoryConfig(listen="127.0.0.1:0", node_ttl_s=TTL_S)).start()
    server.stop()
    stack.enter_context(closing(Holder("a", server.address, [])))
    until(lambda: said("directory cannot be reached", "WARNING") > 0, "it is missed")
    start(stack, server.address)
    until(lambda: said("node a joined", "INFO") > 0, "it is back")
    assert said("directory cannot be reached", "WARNING") == 1


@pytest.mark.parametrize("shards", [1, 3])
def test_what_nodes_hold_is_found_through_all_shards(stack: ExitStack, shards: int) -> None:
    addresses = ",".join(start(stack).address for _ in range(shards))
    names = chain("v", 200)
    a = stack.enter_context(closing(Holder("a", addresses, names[:100])))
    b = stack.enter_context(closing(Holder("b", addresses, names[50:150])))
    asker = stack.enter_context(closing(DirectoryLink(addresses)))
    packed = b"".join(names)
    expected = [True] * 150 + [False] * 50
    until(lambda: asker.where(packed).known() == expected, "the announcements")
    found = asker.where(packed)
    assert found.holders(0) == [("a", "a:1", 1)]
    assert sorted(found.holders(60)) == [("a", "a:1", 1), ("b", "b:1", 1)]
    assert found.holders(199) == []
    assert len(asker.where(packed, run=True)) == 150
    b.drop(names[100:150])
    a.take(names[190:])
    until(lambda: asker.where(packed).known() == [True] * 100 + [False] * 90 + [True] * 10, "the changes")
    assert {row.node_id: row.total_bytes for row in asker.nodes()} == {"a": 1 << 20, "b": 1 << 20}


def test_a_directory_that_lost_everything_says_unknown_and_is_told_again(stack: ExitStack) -> None:
    server = start(stack)
    names = chain("v", 50)
    stack.enter_context(closing(Holder("a", server.address, names[:40])))
    asker = stack.enter_context(closing(DirectoryLink(server.address)))
    packed = b"".join(names)
    until(lambda: asker.where(packed).known() == [True] * 40 + [False] * 10, "the announcement")
    server.stop()
    with pytest.raises(Unavailable):
        asker.where(packed, timeout_s=5.0)
    start(stack, server.address)
    seen: list[bool | None] = []

    def back() -> bool:
        try:
            seen[:] = asker.where(packed).known()
        except Unavailable:
            return False
        assert False not in seen[:40]  # never absent while nobody can know
        return seen == [True] * 40 + [False] * 10

    until(back, "the directory's return")


def test_a_shard_that_hangs_costs_one_deadline_and_leaves_the_others_names_known(stack: ExitStack) -> None:
    server = start(stack)
    silent = socket.create_server(("127.0.0.1", 0))
    stack.callback(silent.close)
    addresses = f"{server.address},127.0.0.1:{silent.getsockname()[1]}"
    names = chain("v", 64)
    stack.enter_context(closing(Holder("a", addresses, names)))
    asker = stack.enter_context(closing(DirectoryLink(addresses)))
    packed = b"".join(names)
    mine = [name[0] < 128 for name in names]
    until(lambda: [bool(known) for known in asker.where(packed, timeout_s=0.2).known()] == mine, "the shard that works")
    assert {known for known, own in zip(asker.where(packed, timeout_s=0.2).known(), mine, strict=True) if not own} == {
        None
    }
    quick = 0
    for _ in range(20):
        began = time.monotonic()
        asker.where(packed, timeout_s=10.0)
        quick += time.monotonic() - began < 5.0
        if quick:
            break
    assert quick


def test_lost_replicas_are_made_again_by_a_survivor(stack: ExitStack) -> None:
    server = start(stack)
    names = chain("v", 1500)
    holders = [
        stack.enter_context(closing(Holder(name, server.address, held, replicas=2)))
        for name, held in (("a", names), ("b", names[:750]), ("c", names[750:]), ("d", []))
    ]
    until(lambda: ask_stat(server.address).census["blocks"] == 3000, "the announcements")
    holders[0].close()
    asked: dict[bytes, str] = {}

    def told() -> bool:
        for holder in holders[1:]:
            for repair in holder.repairs:
                assert repair.target != holder.link._feeds[0]._node.join.node_id
                assert len(repair.names) <= 1000 * 32
                asked.update({repair.names[at : at + 32]: repair.target for at in range(0, len(repair.names), 32)})
        return len(asked) == 1500

    until(told, "the repair of every name")
    shares = [sum(target == name for target in asked.values()) for name in "bcd"]
    assert min(shares) > 200  # b and c get the halves that they lack, d no herd
    until(lambda: ask_stat(server.address).counters["keys"] == 1500, "the sweep")
