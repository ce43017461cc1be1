"""Traffic classes through the real client and node: who waits for whom on a shaped link, and what packets say."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch import Client
from anabranch.core.authentication import Caller
from anabranch.core.errors import InvalidInput, Unavailable
from anabranch.store.values.config import LinkConfig, StoreConfig
from anabranch.store.values.introduction import traffic_of
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.node_server import ValueNode
from anabranch.store.values.messages import Hello
from anabranch.transfer.classes import TrafficClass
from anabranch.transfer.live.marks import MARKS, mark
from anabranch.transfer.live.rails import Links

RATE = 100_000_000
PIECE = 4 << 20


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ValueNode]:
    node = ValueNode(
        "n",
        StoreConfig(dram_bytes=128 << 20, listen="127.0.0.1:0+127.0.0.1:0"),
        arena_path=str(tmp_path / "arena"),
        data_dir=str(tmp_path / "data"),
        links=Links(rate_bytes=RATE, marks=True),
    )
    node.start()
    yield node
    node.stop()


class Migration(threading.Thread):
    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.client = Client(address, traffic="migrate", lanes=4, timeout_s=60.0)
        self.moved = 0
        self.failed = False
        self.stopping = threading.Event()

    def run(self) -> None:
        buffers = [bytearray(PIECE) for _ in range(4)]
        while not self.stopping.is_set():
            got = self.client.get_many_into([f"k{i}" for i in range(4)], buffers)
            self.failed = self.failed or not all(got)
            self.moved += 4 * PIECE


def test_a_load_does_not_wait_for_a_migration(node: ValueNode) -> None:
    with Client(node.address, timeout_s=60.0) as load:
        assert all(outcome.stored for outcome in load.put_many([f"k{i}" for i in range(4)], [bytes(PIECE)] * 4))
        migration = Migration(node.address)
        migration.start()
        deadline = time.monotonic() + 30
        while migration.moved < 8 * PIECE:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        before, bulk = migration.moved, [bytearray(PIECE) for _ in range(4)]
        for _ in range(3):
            assert all(load.get_many_into([f"k{i}" for i in range(4)], bulk))
        moved = migration.moved - before
        migration.stopping.set()
        migration.join(60)
        migration.client.close()
        assert not migration.is_alive()
        assert not migration.failed
        # A batch may have been nearly done when the loads began. Fair shares would have given it twice what they got.
        assert moved <= 8 * PIECE


def test_lanes_are_marked_on_both_sides(node: ValueNode) -> None:
    with socket.socket() as probe:
        if not mark(probe, TrafficClass.PREFETCH):
            pytest.skip("this system refuses marks")
    wanted = MARKS[TrafficClass.PREFETCH].dscp << 2
    with Client(node.address, traffic="prefetch", links=LinkConfig(marks=True)) as client:
        client.put("k", bytes(1000))
        with client._nodes.known[0].lane(Call(20.0)) as lane:  # it has been let in: the node has marked it, too
            assert lane._sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == wanted
            port = lane._sock.getsockname()[1]
            (other,) = [one for one in list(node._door._lanes) if one.sock.getpeername()[1] == port]
            assert other.sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == wanted


def test_a_client_chooses_its_class_and_a_stranger_is_never_more_urgent_than_a_load(node: ValueNode) -> None:
    with pytest.raises(InvalidInput, match="no traffic class 'urgent'; there are model, handoff, load"):
        Client(node.address, traffic="urgent")  # type: ignore[arg-type]
    stranger = Caller(tenant="t", trusted=False, salt=b"")
    friend = Caller(tenant="t", trusted=True, salt=b"")
    for said, to_stranger, to_friend in ((0, 2, 0), (2, 2, 2), (5, 5, 5), (77, 2, 2), (-1, 2, 2)):
        hello = Hello(session=bytes(16), nonce=bytes(32), traffic=said)
        assert traffic_of(hello, stranger) == to_stranger
        assert traffic_of(hello, friend) == to_friend


def test_a_node_that_no_nic_reaches_is_unreachable_not_an_error(node: ValueNode, tmp_path: Path) -> None:
    (tmp_path / "nics.toml").write_text('[[nic]]\nname = "far"\nreaches = ["10.99.0.0/16"]\n')
    says = r"no NIC of the topology reaches 127\.0\.0\.1 \(it has: far\)"
    links = LinkConfig(topology=str(tmp_path / "nics.toml"))
    with Client(node.address, links=links) as client, pytest.raises(Unavailable, match=says):
        client.put("k", b"1")
