"""Several nodes: values are found where they are, and what is lost, hung, cut or damaged is worked round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from value_rig import Rig, noise, rig, until

from anabranch.core.errors import AccessDenied, Unavailable
from anabranch.store.values.messages import Exists, Get, Prefetch, Put
from anabranch.store.values.outcome import Outcome
from anabranch.testing.live.cut_proxy import CutProxy
from anabranch.testing.live.fake_value_node import FakeValueNode

OK, MISSING, UNKNOWN = Outcome.OK, Outcome.MISSING, Outcome.UNKNOWN


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as one:
        yield one


def fill(here: Rig, node: FakeValueNode, values: dict[str, bytes]) -> None:
    client = here.client(node.address)
    assert client.put_many(list(values), list(values.values())) == [OK] * len(values)
    client.close()


def holders(here: Rig, count: int, values: dict[str, bytes]) -> list[FakeValueNode]:
    """`count` nodes that all hold the values, and a directory that knows it."""
    here.start_directory()
    nodes = [here.fake(f"holder{i}") for i in range(count)]
    for node in nodes:
        fill(here, node, values)
        here.announce(node)
    return nodes


VALUES = {"small": b"v", "middle": noise(300_000, 1), "large": noise(5 << 20, 2)}


def test_a_value_of_another_node_is_found_and_comes_home_when_read_twice(here: Rig) -> None:
    (other,) = holders(here, 1, VALUES)
    home = here.fake("home")
    client = here.client(home.address, directory=here.directory)
    for key, value in VALUES.items():
        assert client.get(key) == value
    assert client.get("nowhere") is None
    assert not any(isinstance(message, Prefetch) for message in home.received)
    assert client.get("small") == b"v"
    until(lambda: any(isinstance(message, Prefetch) for message in home.received), "the prefetch at home")
    assert sum(isinstance(message, Get) for message in other.received) == 4
    assert client.exists_many(["small", "large", "nowhere"]) == [True, True, False]
    assert client.longest_prefix(["small", "middle", "nowhere", "large"]) == 2
    assert client.pin(["large", "nowhere"], 5.0) == [OK, MISSING]


def test_a_put_is_seen_at_once_although_nobody_announced_it(here: Rig) -> None:
    here.start_directory()
    node = here.fake()
    here.announce(node)
    client = here.client(node.address, directory=here.directory)
    assert client.put("new", b"v") is OK
    assert client.exists_many(["new", "not"]) == [True, False]
    assert client.get("new") == b"v"


def test_no_read_fails_while_one_of_two_replicas_lives(here: Rig) -> None:
    """Mooncake: 5 of 8 gets fail for 10 s."""
    first, second = holders(here, 2, VALUES)
    client = here.client(here.fake("home").address, directory=here.directory)
    assert client.get("small") == b"v"
    first.close()
    for _ in range(8):
        for key, value in VALUES.items():
            assert client.get(key) == value
    second.close()
    assert client.get_into("small", bytearray(1)).outcome is Outcome.UNREACHABLE


def test_a_batch_is_gathered_from_many_nodes_at_once(here: Rig) -> None:
    here.start_directory()
    keys, values = [f"k{i}" for i in range(30)], [noise(i * 50_000, i) for i in range(30)]
    nodes = [here.fake(f"holder{i}") for i in range(5)]
    for i, node in enumerate(nodes):
        fill(here, node, dict(zip(keys[i::5], values[i::5], strict=True)))
        here.announce(node)
    client = here.client(here.fake("home").address, directory=here.directory)
    buffers = [bytearray(len(value)) for value in values]
    assert all(client.get_many_into(keys, buffers))
    assert buffers == values
    nodes[0].close()
    found = client.get_many_into(keys, buffers)
    assert [got.outcome for got in found] == [Outcome.UNREACHABLE if i % 5 == 0 else OK for i in range(30)]


def test_a_hung_replica_delays_one_read_and_not_the_next(here: Rig) -> None:
    nodes = holders(here, 2, VALUES)
    client = here.client(here.fake("home").address, directory=here.directory, timeout_s=60)
    asked = min(nodes, key=lambda node: node.address)  # of two equal holders this one is asked first
    other = next(node for node in nodes if node is not asked)
    assert client.get_into("small", bytearray(1)).outcome is OK
    other.received.clear()
    asked.faults += ["silent"] * 9
    started = time.monotonic()
    assert client.get("small") == b"v"
    assert client.get("large") == VALUES["large"]
    assert time.monotonic() - started < 30
    assert sum(isinstance(message, Get) for message in other.received) >= 2


def test_a_replica_cut_in_the_middle_is_finished_from_another(here: Rig) -> None:
    first, second = holders(here, 2, VALUES)
    client = here.client(here.fake("home").address, directory=here.directory, lanes=1)
    asked = min((first, second), key=lambda node: node.address)
    asked.faults += ["cut-read"] * 9
    buffers = {key: bytearray(len(value)) for key, value in VALUES.items()}
    assert all(client.get_many_into(list(buffers), list(buffers.values())))
    assert buffers == VALUES


def test_a_damaged_replica_is_reported_and_the_next_one_is_read(here: Rig) -> None:
    first, second = holders(here, 2, VALUES)
    client = here.client(here.fake("home").address, directory=here.directory)
    asked = min((first, second), key=lambda node: node.address)
    asked.faults += ["flip-slice"] * 40
    assert client.get("large") == VALUES["large"]
    until(lambda: len(asked.values) == 2, "the damaged node to drop it")
    other = second if asked is first else first
    other.faults += ["flip-slice"] * 40
    asked.faults.clear()
    assert client.get_into("large", bytearray(5 << 20)).outcome is Outcome.DAMAGED


def test_puts_go_on_at_the_next_node_and_return_home(here: Rig) -> None:
    home, other = here.fake("a"), here.fake("b")
    client = here.client([home.address, other.address])
    assert client.put("k1", b"1") is OK
    assert len(home.values) == 1
    address = home.address
    home.close()
    assert client.put("k2", b"2") is OK
    assert client.put("k3", noise(3 << 20)) is OK
    assert len(other.values) == 2
    again = here.fake("a", address=address)
    until(lambda: client.put("k4", b"4").stored and again.values, "the return to the home node")


def test_a_hung_home_is_passed_over_for_nodes_of_the_directory(here: Rig) -> None:
    (other,) = holders(here, 1, VALUES)
    home = here.fake("home")
    client = here.client(home.address, directory=here.directory, timeout_s=60)
    assert client.put("mine", b"v") is OK
    home.faults += ["silent"] * 100
    started = time.monotonic()
    assert client.get("small") == b"v"
    assert client.put("k", noise(3 << 20)) is OK
    assert [client.get("middle") for _ in range(20)] == [VALUES["middle"]] * 20
    assert client.get("k") == noise(3 << 20)
    assert time.monotonic() - started < 30
    assert client.get_into("mine", bytearray(1)).outcome in (Outcome.UNREACHABLE, MISSING)
    assert len(other.values) == len(VALUES) + 1
    assert set(client.stat().nodes) == {other.address}
    home.faults.clear()
    until(lambda: client.put(f"again{len(home.values)}", b"") is OK and len(home.values) > 1, "the return home")


def test_a_draining_node_is_passed_over(here: Rig) -> None:
    home, other = here.node("home"), here.node("other")
    client = here.client([home.address, other.address])
    assert client.put("k1", b"1") is OK
    home.custody.puts.closing = True
    assert client.put_many(["k2", "k3"], [b"2", noise(3 << 20)]) == [OK, OK]
    assert other.stat().census["values"] == 2
    assert client.get("k1") == b"1"
    assert client.get("k2") == b"2"


def test_without_a_directory_all_given_nodes_are_asked(here: Rig) -> None:
    nodes = [here.fake(f"n{i}") for i in range(3)]
    for i, node in enumerate(nodes):
        fill(here, node, {f"k{i}": b"%d" % i})
    client = here.client(",".join(node.address for node in nodes))
    assert [client.get(f"k{i}") for i in range(4)] == [b"0", b"1", b"2", None]
    assert client.exists_many([f"k{i}" for i in range(4)]) == [True, True, True, False]
    assert client.remove(["k0", "k2", "x"]) == [OK, OK, MISSING]
    assert sum(client.invalidate().values()) == 1
    nodes[2].close()
    assert client.exists_many(["k0"]) == [None]
    assert client.remove(["k0"]) == [Outcome.UNREACHABLE]
    assert client.get_into("k0", bytearray(1)).outcome is Outcome.UNREACHABLE
    with pytest.raises(Unavailable):
        client.invalidate()


def test_a_directory_that_is_down_means_unknown_and_not_absent(here: Rig) -> None:
    server = here.start_directory()
    home = here.fake("home")
    client = here.client(home.address, directory=here.directory)
    assert client.put("k", b"v") is OK
    assert client.get("x") is None
    server.stop()
    assert client.get("k") == b"v"
    assert client.get_into("x", bytearray(1)).outcome is UNKNOWN
    assert client.exists_many(["k", "x"]) == [True, None]


def test_the_directory_alone_is_enough_to_begin_with(here: Rig) -> None:
    here.start_directory()
    node = here.fake()
    here.announce(node)
    client = here.client([], directory=here.directory)
    assert client.put("k", b"v") is OK
    assert client.get("k") == b"v"


def test_a_node_of_another_store_is_no_holder(here: Rig) -> None:
    home, stranger = here.fake("a"), here.fake("b", salt=b"other")
    client = here.client([home.address, stranger.address])
    assert client.put("k", b"v") is OK
    home.close()
    with pytest.raises(AccessDenied, match="secret"):
        client.get("k")


def test_a_stranger_that_the_directory_names_is_passed_over(here: Rig) -> None:
    here.start_directory()
    good, bad = here.fake("good"), here.fake("bad", salt=b"other")
    fill(here, good, VALUES)
    bad.values.update(good.values)
    here.announce(good)
    here.announce(bad)
    client = here.client(here.fake("home").address, directory=here.directory)
    for key, value in VALUES.items():
        assert client.get(key) == value


@pytest.mark.parametrize("size", [300_000, 9 << 20])
def test_transfers_survive_cut_connections(here: Rig, size: int) -> None:
    node = here.node(lease_s=2.0)  # what came inline is held until the lane's next message, or so long
    proxy = CutProxy(node.address)
    here.stack.callback(proxy.close)
    client = here.client(proxy.address, local=False)
    assert client.put("warm", b"") is OK
    for i, place in enumerate([1, size // 3, size - 1000]):
        value = noise(size, i)
        proxy.cut_after(place)
        assert client.put(f"k{i}", value) in (OK, Outcome.PRESENT)
        proxy.cut()
        assert client.get(f"k{i}") == value
    assert proxy.cuts == 3
    until(lambda: not {"leases", "puts"} & {k for k, n in node.stat().census.items() if n}, "nothing to be held")


def test_real_nodes_find_each_others_values(here: Rig) -> None:
    server = here.start_directory()
    nodes = [here.node(name, directory=server.address, heartbeat_s=0.1) for name in ("a", "b")]
    writer = here.client(nodes[0].address, local=False)
    reader = here.client(nodes[1].address, directory=server.address, local=False)
    assert writer.put_many(list(VALUES), list(VALUES.values())) == [OK] * 3
    until(lambda: all(reader.exists_many(list(VALUES))), "the announcements")
    for _ in range(2):
        for key, value in VALUES.items():
            assert reader.get(key) == value
    until(lambda: nodes[1].stat().census["values"] == 3, "copies where the values are read")
    assert reader.remove(list(VALUES)) == [OK] * 3
    assert [writer.get(key) for key in VALUES] == [None] * 3


def test_requests_stay_few(here: Rig) -> None:
    (other,) = holders(here, 1, {f"k{i}": b"v" for i in range(100)})
    home = here.fake("home")
    client = here.client(home.address, directory=here.directory)
    keys = [f"k{i}" for i in range(100)]
    buffers = [bytearray(1) for _ in keys]
    assert all(client.get_many_into(keys, buffers))
    assert sum(isinstance(message, Get) for message in home.received + other.received) == 2
    assert client.exists_many(keys) == [True] * 100
    assert not any(isinstance(message, Exists | Put) for message in home.received)
