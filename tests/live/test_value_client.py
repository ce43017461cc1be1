"""The client against one node: values of all sizes and kinds of buffer, local memory, errors, nothing left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from value_rig import Rig, noise, rig, until

import anabranch
from anabranch.core.errors import AccessDenied, ConfigError, InvalidInput, StaleLease, Unavailable
from anabranch.store.values.live.session import boot_id
from anabranch.store.values.messages import Abandon, Damaged, Get, Offer, Prefetch, Put, Return
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import SLICE_BYTES

SIZES = [0, 1, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, (1 << 20) + 1, (5 << 20) + 3]
OK, PRESENT, DIFFERS, MISSING = Outcome.OK, Outcome.PRESENT, Outcome.DIFFERS, Outcome.MISSING


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Rig]:
    with rig(tmp_path) as one:
        yield one


@pytest.mark.parametrize("way", ["tcp", "unix", "memory"])
def test_values_of_all_sizes_come_back(here: Rig, way: str) -> None:
    node = here.node(unix=way != "tcp")
    address = node.address if way == "memory" else node.local_address or node.address
    client = here.client(address, local=way == "memory")
    assert isinstance(client.put("warm", b"x"), Outcome)
    assert client.stat().local == (way == "memory")
    for size in SIZES:
        value = noise(size, size)
        key = f"k{size}"
        assert client.get(key) is None
        assert client.put(key, value) is OK
        assert client.put(key, value) is PRESENT
        assert client.get(key) == value
        buffer = bytearray(size + 3)
        got = client.get_into(key, buffer)
        assert (got.outcome, got.size, got.tier, bool(got)) == (OK, size, "dram", True)
        assert buffer[:size] == value
        if size:
            other = bytearray(value)
            other[-1] ^= 1
            assert client.put(key, bytes(other)) is DIFFERS
            assert client.get_into(key, bytearray(size - 1)) == anabranch.Got(Outcome.TOO_BIG, size)
        assert client.get(key) == value
    assert client.remove([f"k{size}" for size in SIZES] + ["never"]) == [OK] * len(SIZES) + [MISSING]
    assert client.exists_many([f"k{size}" for size in SIZES]) == [False] * len(SIZES)


def test_a_batch_keeps_its_order_and_says_what_is_missing(here: Rig) -> None:
    client = here.client(here.node().address, lanes=3)
    sizes = [0, 64, 70_000, (1 << 20) + 5, 3 << 20, 100, 6 << 20, 1 << 20, 64] * 2
    keys = [f"k{i}" for i in range(len(sizes))]
    values = [noise(size, i) for i, size in enumerate(sizes)]
    assert client.put_many(keys, values, chain=True) == [OK] * len(sizes)
    client.remove(keys[4:6])
    buffers = [bytearray(size) for size in sizes]
    found = client.get_many_into(keys, buffers)
    assert [got.outcome for got in found] == [OK] * 4 + [MISSING] * 2 + [OK] * (len(sizes) - 6)
    assert all(buffers[i] == values[i] for i, got in enumerate(found) if got)
    assert client.exists_many(keys) == [bool(got) for got in found]
    assert client.longest_prefix(keys) == 4
    assert client.get_many_into([], []) == []
    assert client.put_many([], []) == []


def test_scattered_parts_are_gathered_and_filled(here: Rig) -> None:
    """A block of K/V: one region for each of 30 layers, cut anywhere by the slices."""
    client = here.client(here.node().address)
    layers, size = 30, 98_304
    store = bytearray(noise(layers * size * 2))
    view = memoryview(store)
    blocks = [[view[(2 * i + b) * size :][:size] for i in range(layers)] for b in range(2)]
    assert client.put_many(["b0", "b1"], blocks) == [OK, OK]
    target = bytearray(len(store))
    into = memoryview(target)
    places = [[into[(2 * i + b) * size :][:size] for i in range(layers)] for b in range(2)]
    assert all(client.get_many_into(["b0", "b1"], places))
    assert target == store
    assert client.get("b0") == b"".join(blocks[0])


def test_tenants_namespaces_and_epochs_are_worlds_of_their_own(here: Rig) -> None:
    node = here.node()
    worlds = [{}, {"tenant": "b"}, {"namespace": "n"}, {"epoch": "e"}]
    clients = [here.client(node.address, **world) for world in worlds]
    for i, client in enumerate(clients):
        assert client.put("key", b"%d" % i) is OK
    assert [client.get("key") for client in clients] == [b"0", b"1", b"2", b"3"]
    assert sum(clients[0].invalidate(epoch="e").values()) == 1
    assert [client.get("key") for client in clients] == [b"0", b"1", b"2", None]
    assert sum(clients[0].invalidate().values()) == 2
    assert [client.get("key") for client in clients] == [None, b"1", None, None]
    assert clients[1].put("key", b"1") is PRESENT


def test_views_are_leased_memory_of_the_node_and_end(here: Rig) -> None:
    node = here.node(unix=True, lease_s=5.0)
    client = here.client(node.address)
    values = [noise(3 << 20, 1), b"small", b""]
    client.put_many(["a", "b", "c"], values)
    with client.acquire(["a", "missing", "b", "c"]) as views:
        assert [None if view is None else bytes(view) for view in views] == [values[0], None, values[1], b""]
        assert [views.zero_copy(i) for i in range(4)] == [True, False, True, True]
        assert views.got[1].outcome is MISSING
        assert views.valid
        assert 0 < views.renew() <= 5.0
        held = views[0]
        assert held is not None
        assert held.readonly
        assert client.remove(["a"]) == [OK]
        assert bytes(held) == values[0]  # leased: the place is not reused
        assert node.stat().census["leases"] == 1
    with pytest.raises(ValueError, match="released"):
        held[0]
    with pytest.raises(StaleLease):
        views[0]
    assert not views.valid
    until(lambda: node.stat().census["leases"] == 0, "the lease's return")


def test_an_array_that_outlives_its_view_is_an_error(here: Rig) -> None:
    client = here.client(here.node(unix=True).address)
    assert client.put("k", b"v" * 100) is OK
    makers: list[Callable[[memoryview], object]] = [
        lambda view: np.frombuffer(view, dtype=np.uint8),
        lambda view: np.asarray(view)[3:],
        lambda view: view[1:],
    ]
    for make in makers:
        with pytest.raises(BufferError, match="copy"), client.acquire(["k"]) as views:
            kept = make(views[0])  # type: ignore[arg-type]
        assert not views.valid
        with pytest.raises(KeyError, match="matters"), client.acquire(["k"]) as views:
            kept = (make(views[0]), {}["the one that matters"])  # type: ignore[arg-type]
    with client.acquire(["k"]) as views:
        kept = np.frombuffer(views[0], dtype=np.uint8).copy()  # type: ignore[arg-type]
    assert bytes(kept) == b"v" * 100
    with here.client(here.nodes[0].address, local=False) as far, far.acquire(["k"]) as views:
        kept = np.frombuffer(views[0], dtype=np.uint8)  # type: ignore[arg-type]
    assert bytes(kept) == b"v" * 100


def test_a_view_whose_lease_ended_is_not_given_out(here: Rig) -> None:
    client = here.client(here.node(unix=True, lease_s=0.3).address)
    client.put("a", b"value")
    with client.acquire(["a"]) as views:
        until(lambda: views.left_s < 0, "the end of the lease")
        assert not views.valid
        with pytest.raises(StaleLease, match="renew"):
            views[0]
        with pytest.raises(StaleLease, match="acquire"):
            views.renew()


def test_without_shared_memory_views_are_copies(here: Rig) -> None:
    client = here.client(here.node().address, local=False)
    client.put("a", noise(2 << 20))
    with client.acquire(["a", "b"]) as views:
        assert views[0] == noise(2 << 20)
        assert views[1] is None
        assert not views.zero_copy(0)
        assert views.valid


def test_a_path_that_leads_to_another_node_is_not_followed(here: Rig) -> None:
    """As with a relative path, or one of another container: whoever listens there proves nothing by it."""
    other = here.node("other", unix=True)
    fake = here.fake("n1")
    fake.place = {"boot": boot_id(), "local_address": other.local_address}
    client = here.client(fake.address)
    assert client.put("k", b"v" * 100) is OK
    assert client.get("k") == b"v" * 100
    assert not client.stat().local
    assert len(fake.values) == 1
    with here.client(other.address) as beside:
        assert beside.get("k") is None
        assert beside.stat().local


def test_local_reads_make_no_call_and_miss_what_is_removed(here: Rig) -> None:
    node = here.node(unix=True)
    client = here.client(node.address)
    keys = [f"k{i}" for i in range(500)]
    client.put_many(keys, [b"v%d" % i for i in range(500)])
    asked = dict(node.stat().counters)
    assert client.exists_many(keys) == [True] * 500
    assert client.longest_prefix(keys) == 500
    assert client.get("k7") == b"v7"
    buffers = [bytearray(4) for _ in keys]
    assert all(client.get_many_into(keys, buffers))
    # but for a report of what was read, now and then
    calls = {name: count for name, count in node.stat().counters.items() if count != asked.get(name) and "ask" in name}
    assert not calls
    client.remove(["k7"])
    assert client.get("k7") is None
    assert client.longest_prefix(keys) == 7


def test_the_memory_of_a_dead_node_is_not_read_and_a_successors_is(here: Rig) -> None:
    node = here.node("n", unix=True)
    address = node.address
    client = here.client(address)
    assert client.put("k", b"v") is OK
    with client.acquire(["k"]) as views:
        assert views.valid
        node.stop(keep=True)
        assert not views.valid
    assert client.get_into("k", bytearray(1)).outcome is Outcome.UNREACHABLE
    assert client.exists_many(["k"]) == [None]
    again = here.node("n", unix=True, listen=address)
    until(lambda: client.get("k") == b"v", "the values that were kept")
    until(lambda: client.stat().local, "the successor's memory")
    assert client.remove(["k"]) == [OK]
    assert client.get("k") is None
    assert again.stat().census["values"] == 0


def test_what_is_read_in_shared_memory_stays_when_room_is_made(here: Rig) -> None:
    client = here.client(here.node(unix=True, dram_bytes=16 << 20, eviction="lru").address)
    assert client.put("hot", noise(1 << 20)) is OK

    def read_until_the_node_knows() -> None:
        uses = entry.uses
        until(lambda: client.get("hot") and entry.uses > uses, "the report")

    node = here.nodes[0]
    entry = node.custody.shelf.entries()[0]
    for i in range(40):
        if i % 8 == 0:
            read_until_the_node_knows()
        assert client.put(f"k{i}", noise(1 << 20, i)) is OK
    assert client.exists_many(["hot", "k0", "k39"]) == [True, False, True]


def test_pins_hold_values_while_others_go(here: Rig) -> None:
    client = here.client(here.node(dram_bytes=16 << 20).address)
    assert client.put("pinned", noise(1 << 20)) is OK
    assert client.pin(["pinned", "nothing"], 60) == [OK, MISSING]
    for i in range(40):
        assert client.put(f"k{i}", noise(1 << 20, i)) is OK
    assert client.get("pinned") == noise(1 << 20)
    assert client.unpin(["pinned"]) == [OK]
    for i in range(40, 80):
        assert client.put(f"k{i}", noise(1 << 20, i)) is OK
    assert client.get("k0") is None
    with pytest.raises(InvalidInput, match="finite"):
        client.pin(["k0"], float("inf"))
    assert client.prefetch(["k79", "nothing"]) == [OK, MISSING]


def test_a_batch_larger_than_the_node_goes_through(here: Rig) -> None:
    """Mooncake accepts 10 of 64 here."""
    client = here.client(here.node(dram_bytes=32 << 20).address, timeout_s=60)
    values = [noise(2 << 20, i) for i in range(40)]
    keys = [f"k{i}" for i in range(40)]
    outcomes = client.put_many(keys, values)
    assert outcomes == [OK if there else Outcome.FULL for there in client.exists_many(keys)]
    assert outcomes[-1] is OK
    assert 8 <= outcomes.count(OK) <= 16
    assert client.get("k39") == values[39]
    assert client.put_many(keys[:16], [b"small"] * 16).count(OK) >= 8
    assert client.put("huge", noise(33 << 20)) is Outcome.TOO_BIG


# --- scenarios ----------------------------------------------------------------------------------------------------


def test_s11_a_writer_dies_between_offer_and_seal(here: Rig) -> None:
    node = here.node()
    value = noise(4 << 20)
    dead = here.client(node.address)
    assert dead.put("other", b"") is OK

    def die(*_: object) -> None:
        dead._nodes.close()  # its lanes end as those of a killed process do

    timer = threading.Thread(target=lambda: (until(lambda: node.stat().census["puts"], "the offer"), die()))
    timer.start()
    outcome = dead.put("key", [value[i : i + 4096] for i in range(0, len(value), 4096)] * 8)
    timer.join()
    reader = here.client(node.address)
    if outcome is not OK:
        assert outcome is Outcome.UNREACHABLE
        assert reader.get("key") is None
        assert reader.exists_many(["key"]) == [False]
    until(lambda: node.stat().census["puts"] == 0, "the end of the dead writer's put")
    assert reader.put("key2", value) is OK
    assert reader.get("key2") == value


def test_s12_equal_writers_share_one_copy_and_another_is_refused(here: Rig) -> None:
    node = here.node()
    client = here.client(node.address)
    for size in (1000, 3 << 20):
        key, value = f"k{size}", noise(size)
        with ThreadPoolExecutor(8) as writers:
            outcomes = list(writers.map(lambda _, k=key, v=value: client.put(k, v), range(8)))
        assert set(outcomes) <= {OK, PRESENT}
        assert outcomes.count(OK) == 1
        assert client.put(key, value[:-1] + b"?") is DIFFERS
        assert client.get(key) == value
    assert node.stat().census["values"] == 2


def test_s13_asking_for_all_keys_protects_nothing(here: Rig) -> None:
    client = here.client(here.node(dram_bytes=16 << 20).address)
    keys = [f"k{i}" for i in range(60)]
    for i in range(60):
        assert client.put(keys[i], noise(1 << 20, i)) is OK
        client.exists_many(keys[: i + 1])
    there = client.exists_many(keys)
    assert there[59]
    assert not all(there)


def test_s16_a_flipped_byte_is_a_miss_and_is_counted(here: Rig) -> None:
    node = here.node()
    client = here.client(node.address, local=False)
    for key, size in (("small", 10_000), ("large", 3 << 20)):
        value = noise(size, 5)
        client.put(key, value)
        entry = next(e for e in node.custody.shelf.entries() if e.size == size)
        node.custody.memory.data[entry.offset + size - 1] ^= 1
        got = client.get_into(key, bytearray(size))
        assert got.outcome is Outcome.DAMAGED
        count = 1 + (key == "large")
        until(lambda n=count: node.stat().counters.get("damaged") == n, "the node's own look at it")
        assert client.get_into(key, bytearray(size)).outcome is MISSING
        assert client.put(key, value) is OK
        assert client.get(key) == value


# --- what goes wrong on the way -----------------------------------------------------------------------------------


def test_damage_on_the_way_is_read_again(here: Rig) -> None:
    node = here.fake()
    client = here.client(node.address, lanes=1)
    client.put_many(["a", "b"], [noise(1000), noise(3 << 20)])
    node.faults += ["flip-inline", "flip-slice"]
    assert client.get("a") == noise(1000)
    assert client.get("b") == noise(3 << 20)
    assert node.faults == []
    node.faults += ["flip-slice"] * 30
    assert client.get_into("b", bytearray(3 << 20)).outcome is Outcome.DAMAGED
    until(lambda: any(isinstance(message, Damaged) for message in node.received), "the word about it")
    until(lambda: not node.leases, "the return of all leases")


def test_a_lease_that_ended_is_taken_again(here: Rig) -> None:
    node = here.fake()
    client = here.client(node.address)
    client.put("a", noise(8 << 20))
    node.faults.append("lease-over")
    assert client.get("a") == noise(8 << 20)
    assert sum(isinstance(message, Get) for message in node.received) == 2
    until(lambda: not node.leases, "the return of all leases")


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_read_goes_on_after_its_lane_was_cut(here: Rig, lanes: int) -> None:
    node = here.fake()
    client = here.client(node.address, lanes=lanes)
    client.put("a", noise(12 << 20))
    node.faults.append("cut-read")
    assert client.get("a") == noise(12 << 20)
    assert node.faults == []


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("fault", ["cut-slice", "lose-slice"])
def test_only_slices_that_did_not_arrive_are_sent_again(here: Rig, fault: str, lanes: int) -> None:
    node = here.fake()
    client = here.client(node.address, lanes=lanes)
    client.put("warm", b"")
    node.faults += [fault, fault]
    value = noise(20 << 20)
    assert client.put("a", value) is OK
    assert client.get("a") == value
    assert node.faults == []
    assert sum(isinstance(message, Offer) for message in node.received) == 1


def test_what_cannot_be_is_said_at_once(here: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    node = here.fake()
    client = here.client(node.address)
    for wrong, error in [
        (lambda: client.put("", b""), "1 to 1024"),
        (lambda: client.put("k" * 1025, b""), "1 to 1024"),
        (lambda: client.put("k", "text"), "buffer"),
        (lambda: client.put_many(["k"], []), "1 keys and 0"),
        (lambda: client.put_many("k", [b""]), "list"),
        (lambda: client.put("k", b"", replicas=9), "replicas"),
        (lambda: client.put("k", b"", replicas="2"), "replicas is a whole number"),  # type: ignore[arg-type]
        (lambda: client.put("k", b"", durable="no"), "durable"),  # type: ignore[arg-type]
        (lambda: client.put_many(["k"], b"v"), "values is one value"),
        (lambda: client.get_many_into(["k"], bytearray(1)), "buffers is one buffer"),
        (lambda: client.remove("v"), "keys is one key"),
        (lambda: client.exists_many(b"v"), "keys is one key"),  # type: ignore[arg-type]
        (lambda: client.longest_prefix("v"), "keys is one key"),
        (lambda: client.prefetch("v"), "keys is one key"),
        (lambda: client.pin("v", 1.0), "keys is one key"),
        (lambda: client.unpin("v"), "keys is one key"),
        (lambda: client.acquire("v"), "keys is one key"),
        (lambda: client.exists_many(7), "keys is a list"),  # type: ignore[arg-type]
        (lambda: client.pin(["k"], float("inf")), "seconds"),
        (lambda: client.pin(["k"], "1"), "seconds"),  # type: ignore[arg-type]
        (lambda: client.invalidate(epoch=1), "epoch is a str"),  # type: ignore[arg-type]
        (lambda: client.put("k", np.array([[], {}], dtype=object)), "references to objects"),
        (lambda: client.get_into("k", (ctypes.c_void_p * 2)()), "references to objects"),
        (lambda: anabranch.Client(node.address, epoch=1), "epoch is a str"),  # type: ignore[arg-type]
        (lambda: anabranch.Client(node.address, tenant=b"a"), "tenant is a str"),  # type: ignore[arg-type]
        (lambda: anabranch.Client(node.address, timeout_s="5"), "timeout_s"),  # type: ignore[arg-type]
        (lambda: anabranch.Client(node.address, lanes=0), "lanes"),
        (lambda: anabranch.Client("localhost"), "expected host:port"),
        (lambda: anabranch.Client("localhost:65536"), "expected host:port"),
        (lambda: anabranch.Client(directory="localhost"), "directory 'localhost' is no address"),
        (lambda: client.get_into("k", b"read-only"), "read-only"),
        (lambda: anabranch.Client(node.address, timeout_s=0), "timeout_s"),
    ]:
        with pytest.raises(InvalidInput, match=error):
            wrong()
    keys, values = (f"k{i}" for i in range(3)), (b"v%d" % i for i in range(3))
    assert client.put_many(keys, values) == [OK] * 3  # type: ignore[arg-type]
    assert client.exists_many(f"k{i}" for i in range(3)) == [True] * 3  # type: ignore[arg-type]
    monkeypatch.delenv("ANABRANCH_STORE", raising=False)
    with pytest.raises(InvalidInput, match="ANABRANCH_STORE"):
        anabranch.Client()
    monkeypatch.setenv("ANABRANCH_STORE", node.address)
    with anabranch.Client() as other:
        assert other.get("k") is None


def test_a_store_that_is_not_there(here: Rig, tmp_path: Path) -> None:
    client = here.client(f"unix:{tmp_path}/nothing", timeout_s=2)
    for _ in range(2):
        with pytest.raises(Unavailable, match="no node of the store"):
            client.get("k")
    with pytest.raises(ConfigError, match="secret"):
        here.client("127.0.0.1:1", secret=tmp_path / "none")
    secretive = here.client(here.fake().address, secret=os.urandom(32))
    with pytest.raises(AccessDenied, match="asks for no secret"):
        secretive.get("k")


def test_unconfirmed_invalidation_is_an_error_that_names_the_place(here: Rig) -> None:
    node = here.fake("n7")
    client = here.client(node.address)
    node.faults.append("unconfirmed")
    with pytest.raises(Unavailable, match="n7/dram"):
        client.invalidate()
    assert client.invalidate() == {"n7/dram": 0}


def test_a_hung_node_costs_no_more_than_the_deadline(here: Rig) -> None:
    node = here.fake()
    client = here.client(node.address, timeout_s=0.5)
    client.put("a", b"")
    node.faults.append("silent")
    started = time.monotonic()
    assert client.get_into("a", bytearray(1)).outcome is Outcome.UNREACHABLE
    assert time.monotonic() - started < 10
    assert client.get("a") == b""


def test_a_closed_client_says_so_and_a_forked_one_too(here: Rig) -> None:
    node = here.fake()
    client = here.client(node.address)
    client.put("a", b"v")
    reader, writer = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            client.get("a")
        except InvalidInput as error:
            writer.send_bytes(str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"after the fork" in reader.recv_bytes()
    reader.close()
    writer.close()
    assert client.get("a") == b"v"
    client.close()
    client.close()
    with pytest.raises(Unavailable, match="closed"):
        client.get("a")


def test_ctrl_c_in_the_middle_of_a_put_leaves_the_client_usable(here: Rig) -> None:
    node = here.fake()
    client = here.client(node.address)
    client.put("a", b"v")
    node.faults.append("silent")
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        until(lambda: not node.faults, "the request")
        ctypes.pythonapi.PyErr_CheckSignals()
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.get("a")
    thread.join()
    assert client.get("a") == b"v"
    assert client.put("big", noise(9 << 20)) is OK


@pytest.mark.parametrize("unix", [False, True])
def test_many_threads_share_one_client(here: Rig, unix: bool) -> None:
    client = here.client(here.node(unix=unix).address)
    wrong: list[str] = []

    def work(n: int) -> None:
        for i in range(20):
            key, value = f"{n}-{i}", noise(1000 * i + n, n * 100 + i)
            if client.put(key, value) is not OK or client.get(key) != value or client.exists_many([key]) != [True]:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_messages_are_as_few_as_they_can_be(here: Rig) -> None:
    node = here.fake()
    client = here.client(node.address)
    client.put_many([f"k{i}" for i in range(16)], [bytes(65536)] * 16)
    client.get_many_into([f"k{i}" for i in range(16)], [bytearray(65536) for _ in range(16)])
    kinds = [type(message) for message in node.received[1:]]
    assert kinds == [Put, Get]
    assert Return not in kinds
    assert Abandon not in kinds
    assert Prefetch not in kinds
