"""Scenarios of the value store that need its real processes (README.md lists where the others are tested)."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.core.authentication import Credentials
from anabranch.core.errors import Unavailable
from anabranch.store.values.live.session import Session
from anabranch.store.values.messages import Granted, Offer, Seal, Slice, Stored
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import Scope, name_of
from anabranch.store.values.slices import SLICE_BYTES, slice_sum
from anabranch.testing.chaos.live.store_rig import RigConfig, StoreRig

pytestmark = pytest.mark.cluster
KEYS = [f"block/{number}" for number in range(12)]
LARGE = 1_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreRig]:
    config = RigConfig(nodes=2, dram_bytes=16 << 20, ssd_bytes=64 << 20)
    rig = StoreRig(tmp_path, config, 1, lambda name, pipe: None)
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


def client(store: StoreRig, **settings: object) -> anabranch.Client:
    nodes = [store.addresses[name] for name in store.names("node")]
    return anabranch.Client(nodes, directory=store.directory, timeout_s=10.0, **settings)  # type: ignore[arg-type]


def test_s07_a_new_weights_revision_ends_what_is_under_way_and_nothing_old_is_hit_anywhere(store: StoreRig) -> None:
    values = [key.encode() * 500 for key in KEYS]
    with client(store, epoch="r1") as old, client(store, epoch="r2") as new, Reader(store) as reader:
        for one in (old, new):
            assert one.put_many(KEYS, values, replicas=2, durable=True) == [Outcome.OK] * len(KEYS)
        with Save(store) as save:
            places = old.invalidate(epoch="r1")
            reader.confirmed.set()
            assert {f"{node}/{tier}" for node in ("node-0", "node-1") for tier in ("dram", "ssd")} <= places.keys()
            assert all(count >= 0 for count in places.values())
            assert places["node-0/dram"] + places["node-1/dram"] == 2 * len(KEYS)
            assert save.seal() <= {Outcome.STALE}
        reader.wait(5)
        assert not any(reader.found)
        end = time.monotonic() + 20.0
        while any(old.exists_many([*KEYS, "late"])):
            assert time.monotonic() < end, "the directory does not hear of it"
    for name in store.names("node"):
        store.victims[name].strike(signal.SIGKILL)
    store.wait_ready()
    with client(store, epoch="r1") as old, client(store, epoch="r2") as new:
        assert [old.get(key) for key in KEYS] == [None] * len(KEYS), "a restart brought them back"
        assert [new.get(key) for key in KEYS] == values


class Save:
    """One in flight, of revision r1: its first slice is there."""

    def __init__(self, store: StoreRig) -> None:
        end = time.monotonic() + 30.0
        self._lane, welcome = Session(Credentials(epoch="r1")).open(store.addresses["node-0"], 10.0, end)
        name = name_of("late", Scope("default", epoch="r1").name_key(welcome.salt))
        self._lane.send(Offer(op=1, names=name, sizes=[LARGE], replicas=1))
        self._put = self._lane.answer(Granted, 1).put
        self._send(0, SLICE_BYTES)

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_: object) -> None:
        self._lane.close()

    def seal(self) -> set[int]:
        self._send(1, LARGE - SLICE_BYTES)
        sums = [slice_sum(bytes(size)) for size in (SLICE_BYTES, LARGE - SLICE_BYTES)]
        self._lane.send(Seal(op=2, put=self._put, sums=sums))
        return set(self._lane.answer(Stored, 2).outcomes)

    def _send(self, index: int, size: int) -> None:
        data = bytes(size)
        self._lane.send(Slice(put=self._put, item=0, slice=index, sum=slice_sum(data)), payload=[memoryview(data)])


class Reader:
    """Loads of revision r1 without end. `found`: how many values each round of loads that began after `confirmed`
    found."""

    def __init__(self, store: StoreRig) -> None:
        self._client = client(store, epoch="r1", local=False)
        self._ended = threading.Event()
        self.confirmed = threading.Event()
        self.found: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def wait(self, rounds: int) -> None:
        end = time.monotonic() + 20.0
        while len(self.found) < rounds:
            assert time.monotonic() < end, "the reader does not read"
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._ended.is_set():
            late = self.confirmed.is_set()
            count = sum(self._client.get(key) is not None for key in KEYS[:3])
            if late:
                self.found.append(count)


@pytest.mark.parametrize("how", ["stopped", "dead"])
def test_s07_a_reset_that_a_node_cannot_confirm_fails_and_names_it(store: StoreRig, how: str) -> None:
    with client(store, epoch="r1") as old:
        assert old.put_many(KEYS, [b"x"] * len(KEYS), replicas=2) == [Outcome.OK] * len(KEYS)
        if how == "stopped":
            store.victims["node-1"].strike(signal.SIGSTOP)
        else:
            store.victims["node-1"].remove()
        with pytest.raises(Unavailable, match="not confirmed by"):
            old.invalidate(epoch="r1")
        if how == "stopped":
            store.victims["node-1"].strike(signal.SIGCONT)
        else:
            store.victims["node-1"].restore()
        store.wait_ready()
        assert all(count >= 0 for count in old.invalidate(epoch="r1").values())
        assert [old.get(key) for key in KEYS] == [None] * len(KEYS)


def test_s07_a_node_that_was_dead_meanwhile_brings_nothing_back(store: StoreRig) -> None:
    first, second = (store.addresses[name] for name in store.names("node"))
    values = [key.encode() * 500 for key in KEYS]
    with client(store, epoch="r1") as old, client(store, epoch="r2") as new:
        for one in (old, new):
            assert one.put_many(KEYS, values, replicas=2, durable=True) == [Outcome.OK] * len(KEYS)
    store.victims["node-1"].remove()
    with anabranch.Client([first], timeout_s=10.0, epoch="r1") as old:
        end = time.monotonic() + 20.0
        while not confirmed(old, "r1"):
            assert time.monotonic() < end, "nobody confirms it"
            time.sleep(0.05)
    with anabranch.Client([first], timeout_s=10.0, epoch="r2") as new:
        new.remove(KEYS[:3])
    store.victims["node-1"].restore()
    store.wait_ready()
    with anabranch.Client([second], timeout_s=10.0, epoch="r1") as old:
        assert [old.get(key) for key in KEYS] == [None] * len(KEYS)
    with anabranch.Client([second], timeout_s=10.0, epoch="r2") as new:
        assert [new.get(key) for key in KEYS] == [None] * 3 + values[3:]


def confirmed(client: anabranch.Client, epoch: str) -> bool:
    try:
        client.invalidate(epoch=epoch)
    except Unavailable:
        return False
    return True
