"""A node of the value store, spoken to with its own messages over real sockets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from value_lanes import MIB, Caller, NodeRig, arena_path, name, until

from anabranch.core.authentication import Credentials
from anabranch.core.errors import ConfigError, Unavailable
from anabranch.store.values.config import StoreConfig
from anabranch.store.values.messages import (
    Abandon,
    Damaged,
    Denied,
    Done,
    Exists,
    Invalidate,
    Listing,
    Offer,
    Pin,
    Presence,
    Put,
    Remove,
    Return,
    Slice,
    Verify,
)
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.slices import SLICE_BYTES, slice_sum, value_sum

OK, PRESENT, DIFFERS, MISSING, FULL = (
    Outcome.OK,
    Outcome.PRESENT,
    Outcome.DIFFERS,
    Outcome.MISSING,
    Outcome.FULL,
)
Start = Callable[..., NodeRig]


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    rigs: list[NodeRig] = []

    def make(dram: int = 64 * MIB, **more: Any) -> NodeRig:
        config = StoreConfig(dram_bytes=dram, listen="127.0.0.1:0", lease_s=more.pop("lease_s", 30.0), eviction="lru")
        arena = arena_path(f"{len(rigs)}")
        rigs.append(NodeRig(tmp_path, arena, config, **more))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.node.stop()
        assert not [f for f in os.listdir("/dev/shm") if f.startswith(os.path.basename(rig.arena))]


@pytest.fixture
def rig(start: Start) -> NodeRig:
    return start()


@pytest.fixture
def caller(rig: NodeRig) -> Iterator[Caller]:
    caller = Caller(rig.node.address)
    yield caller
    caller.close()


@pytest.mark.parametrize("size", [0, 1, 100, 4096, 64 << 10, SLICE_BYTES + 1, MIB])
def test_a_value_comes_back_as_it_was_put(caller: Caller, size: int) -> None:
    one, value = name(), os.urandom(size)
    assert caller.put([one], [value]) == [OK]
    assert caller.get([one, name()]) == [value, MISSING]
    assert caller.put([one], [value]) == [PRESENT]


def test_a_batch_of_many_sizes(caller: Caller) -> None:
    names = [name() for _ in range(600)]
    values = [os.urandom(37 * i % 3000) for i in range(600)]
    assert caller.put(names, values) == [OK] * 600
    assert caller.get(names) == values
    assert caller.get([*names[:300], name(), *names[300:]]) == [*values[:300], MISSING, *values[300:]]
    assert caller.put(names, values) == [PRESENT] * 600
    outcomes = caller.find([*names[:300], name(), *names[300:]], run=True).outcomes
    assert outcomes == bytes([OK] * 300 + [MISSING] * 301)
    assert caller.ask(Pin(op=1, names=b"".join(names), seconds=9)).outcomes == bytes([OK]) * 600
    assert caller.ask(Remove(op=1, names=b"".join(names))).outcomes == bytes([OK]) * 600


def test_large_values_travel_in_slices_on_any_lane(rig: NodeRig, caller: Caller) -> None:
    other = caller.another(rig.node.local_address)
    one, value = name(), os.urandom(3 * SLICE_BYTES + 17)
    granted = caller.offer([one], [len(value)])
    assert granted.outcomes == bytes([Outcome.SEND])
    caller.slices(granted.put, 0, value, skip=[1, 2])
    assert caller.seal(granted.put, [value]).missing == [(0, 1), (0, 2)]
    assert caller.get([one]) == [MISSING]
    other.slices(granted.put, 0, value, skip=[0, 3])
    assert other.seal(granted.put, [value]).outcomes == bytes([OK])
    assert other.get_large(one) == value
    assert caller.get_large(one) == value
    other.close()


def test_a_slice_sent_again_takes_its_place_from_a_lane_that_fell_silent(rig: NodeRig, caller: Caller) -> None:
    """As behind a cut cable: the node has half a slice and no word that the rest will not come."""
    silent = caller.another(rig.node.address)
    one, value = name(), os.urandom(2 * SLICE_BYTES)
    granted = caller.offer([one], [len(value)])
    half = memoryview(value)[: SLICE_BYTES // 2]
    silent.lane.send(Slice(put=granted.put, item=0, slice=0, sum=slice_sum(value[:SLICE_BYTES])), payload=[half])
    deadline = time.monotonic() + 20
    while not rig.node._puts._writers:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    caller.slices(granted.put, 0, value)
    assert caller.seal(granted.put, [value]).outcomes == bytes([OK])
    assert caller.get_large(one) == value
    silent.close()


def test_a_slice_with_a_wrong_sum_is_asked_for_again(rig: NodeRig, caller: Caller) -> None:
    one, value = name(), os.urandom(SLICE_BYTES + 5)
    granted = caller.offer([one], [len(value)])
    caller.slices(granted.put, 0, value)
    bad = b"x" * 5
    caller.lane.send(Slice(put=granted.put, item=0, slice=1, sum=slice_sum(b"other")), payload=[memoryview(bad)])
    assert caller.seal(granted.put, [value]).missing == [(0, 1)]
    caller.slices(granted.put, 0, value, skip=[0])
    assert caller.seal(granted.put, [value]).outcomes == bytes([OK])
    assert caller.get_large(one) == value
    assert rig.counter("damaged_slices") == 1


def test_eight_equal_writers_and_one_that_differs(rig: NodeRig) -> None:
    """S12."""
    one, value, other = name(), os.urandom(2 * MIB), os.urandom(2 * MIB)
    callers = [Caller(rig.node.address) for _ in range(9)]
    grants = [c.offer([one], [2 * MIB]) for c in callers]
    assert all(g.outcomes == bytes([Outcome.SEND]) for g in grants)
    for c, g in zip(callers[:8], grants[:8], strict=True):
        c.slices(g.put, 0, value)
    callers[8].slices(grants[8].put, 0, other)
    results: list[int] = []

    def seal(i: int) -> None:
        results.append(callers[i].seal(grants[i].put, [value]).outcomes[0])

    threads = [threading.Thread(target=seal, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [OK] + [PRESENT] * 7
    assert callers[8].seal(grants[8].put, [other]).outcomes == bytes([DIFFERS])
    assert callers[8].put_large([one], [other]) == [PRESENT]
    again = callers[8].offer([one], [2 * MIB])
    assert again.present == [
        value_sum(2 * MIB, [slice_sum(value[i : i + SLICE_BYTES]) for i in range(0, 2 * MIB, SLICE_BYTES)])
    ]
    assert callers[0].put_large([one], [other[:-1]]) == [DIFFERS]
    assert callers[0].put([one], [b"small"]) == [DIFFERS]
    assert callers[3].get_large(one) == value
    for c in callers:
        c.close()
    until(lambda: rig.census()["lanes"] == 0, "lanes end")
    assert rig.census()["values"] == 1
    assert rig.census()["reserved_bytes"] == 0


def test_a_writer_that_dies_leaves_nothing(rig: NodeRig, caller: Caller) -> None:
    """S11, mooncake's case 7: no other writer is lied to meanwhile."""
    one, value = name(), os.urandom(2 * MIB)
    dying = Caller(rig.node.address)
    granted = dying.offer([one], [len(value)])
    dying.slices(granted.put, 0, value, skip=[3])
    assert caller.get([one]) == [MISSING]
    assert caller.put_large([one], [value]) == [OK]
    dying.close()
    until(lambda: rig.census()["puts"] == 0, "the put ends with its session")
    assert caller.get_large(one) == value
    assert rig.census()["reserved_bytes"] == 0
    late = Caller(rig.node.address)
    assert late.seal(granted.put, [value]).outcomes == b""
    late.close()


def test_an_abandoned_put_frees_its_room(rig: NodeRig, caller: Caller) -> None:
    granted = caller.offer([name()], [60 * MIB])
    assert rig.census()["reserved_bytes"] == 60 * MIB
    caller.lane.send(Abandon(put=granted.put))
    assert caller.put([name()], [b"x"]) == [OK]
    assert rig.census()["reserved_bytes"] == 0


def test_a_batch_into_a_full_store_keeps_every_item(rig: NodeRig, caller: Caller) -> None:
    """Mooncake's case 5: 64 values of which each needs an eviction."""
    old = [name() for _ in range(16)]
    for one in old:
        assert caller.put_large([one], [os.urandom(4 * MIB)]) == [OK]
    assert rig.census()["free_bytes"] == 0
    new, values = [name() for _ in range(16)], [os.urandom(4 * MIB) for _ in range(16)]
    assert caller.put_large(new, values) == [OK] * 16
    assert [caller.get_large(one) for one in new] == values
    assert caller.ask(Exists(op=1, names=b"".join(old))).tiers == bytes(16)


def test_what_can_never_fit_evicts_nothing(rig: NodeRig, caller: Caller) -> None:
    """Mooncake's case 1."""
    names = [name() for _ in range(50)]
    for one in names:
        caller.put([one], [os.urandom(MIB)])
    for _ in range(5):
        assert caller.offer([name()], [65 * MIB]).outcomes == bytes([Outcome.TOO_BIG])
    assert caller.ask(Exists(op=1, names=b"".join(names))).tiers == bytes([1]) * 50
    assert rig.counter("evicted") == 0
    assert caller.put_large([name()], [bytes(64 * MIB)]) == [OK]


def test_a_put_waits_for_a_lease_to_end(rig: NodeRig, caller: Caller) -> None:
    one, value = name(), os.urandom(40 * MIB)
    assert caller.put_large([one], [value]) == [OK]
    found = caller.find([one])
    assert found.lease
    writer = Caller(rig.node.address)
    assert writer.put_large([name()], [value], wait_s=0.0) == [FULL]
    results: list[list[Outcome]] = []
    thread = threading.Thread(target=lambda: results.append(writer.put_large([name()], [value], wait_s=50.0)))
    thread.start()
    until(lambda: rig.census()["waiting"] == 1, "the put waits")
    assert caller.read(found, 0, 0, SLICE_BYTES) == value[:SLICE_BYTES]
    caller.lane.send(Return(lease=found.lease))
    thread.join()
    assert results == [[OK]]
    assert caller.get([one]) == [MISSING]
    writer.close()


def test_a_lease_ends_by_itself(start: Start) -> None:
    rig = start(lease_s=0.2)
    caller = Caller(rig.node.address)
    one = name()
    caller.put_large([one], [os.urandom(2 * MIB)])
    found = caller.find([one])
    assert 0 < found.lease_s <= 0.2
    until(lambda: rig.census()["leases"] == 0, "the lease ends")
    assert caller.read(found, 0, 0, SLICE_BYTES) is None
    caller.close()


def test_views_name_the_place_in_the_arena(rig: NodeRig, caller: Caller) -> None:
    one, value = name(), os.urandom(5000)
    caller.put([one], [value])
    found = caller.find([one], views=True)
    with open(caller.welcome.arena_path, "rb") as arena:
        arena.seek(found.offsets[0])
        assert arena.read(len(value)) == value
    caller.close()
    until(lambda: rig.census()["lanes"] == 0, "the lane ends")
    assert rig.census()["leases"] == 1, "whoever mapped it may still read"


def test_run_stops_at_the_first_hole(caller: Caller) -> None:
    names = [name() for _ in range(5)]
    caller.put(names[:2] + names[3:], [b"a", b"b", b"d", b"e"])
    assert caller.find(names, limit=100, run=True).outcomes == bytes([OK, OK, MISSING, MISSING, MISSING])
    buffer = bytearray(2)
    caller.lane.receive_into([memoryview(buffer)])
    assert caller.ask(Exists(op=1, names=b"".join(names), run=True)) == Presence(op=1, tiers=bytes([1, 1, 0, 0, 0]))


def test_exists_protects_nothing(rig: NodeRig, caller: Caller) -> None:
    """S13."""
    first = name()
    caller.put([first], [bytes(MIB)])
    for _ in range(70):
        caller.ask(Exists(op=1, names=first))
        assert caller.put([name()], [os.urandom(MIB)]) == [OK]
    assert caller.get([first]) == [MISSING]


def test_a_flipped_byte_is_found_and_dropped(rig: NodeRig, caller: Caller) -> None:
    """S16."""
    one, value = name(), os.urandom(2 * MIB)
    caller.put_large([one], [value])
    found = caller.find([one], views=True)
    with open(caller.welcome.arena_path, "r+b") as arena:
        arena.seek(found.offsets[0] + 7)
        arena.write(bytes([value[7] ^ 1]))
    caller.lane.send(Damaged(lease=found.lease, items=[0]))
    assert caller.get([one]) == [MISSING]
    assert rig.counter("damaged") == 1
    caller.lane.send(Return(lease=found.lease))
    assert caller.put_large([one], [value]) == [OK]
    other = name()
    caller.put([other], [b"whole"])
    assert caller.ask(Verify(op=2)) == Done(op=2, places={"dram/good": 2, "dram/damaged": 0})


def test_pins_keep_and_end(start: Start) -> None:
    rig = start()
    caller = Caller(rig.node.address)
    kept = [name(), name()]
    caller.put_large(kept, [os.urandom(10 * MIB)] * 2)
    assert caller.ask(Pin(op=1, names=b"".join([*kept, name()]), seconds=100)).outcomes == bytes([OK, OK, MISSING])
    for _ in range(8):
        caller.put_large([name()], [os.urandom(10 * MIB)])
    assert caller.ask(Exists(op=1, names=b"".join(kept))).tiers == bytes([1, 1])
    more = [name(), name()]
    caller.put_large(more, [os.urandom(10 * MIB)] * 2)
    assert caller.ask(Pin(op=1, names=b"".join(more), seconds=100)).outcomes == bytes([OK, FULL])
    assert caller.ask(Remove(op=1, names=kept[0])).outcomes == bytes([OK])
    assert rig.census()["pins"] == 2
    assert caller.ask(Pin(op=1, names=kept[1], seconds=0.01)).outcomes == bytes([OK]), "the later end counts"
    assert caller.ask(Pin(op=1, names=kept[1], seconds=0)).outcomes == bytes([OK])
    assert caller.ask(Pin(op=1, names=more[0], seconds=0)).outcomes == bytes([OK])
    assert rig.census()["pins"] == 0
    assert caller.ask(Pin(op=1, names=kept[1], seconds=0.05)).outcomes == bytes([OK])
    until(lambda: rig.census()["pins"] == 0, "the pin ends")
    caller.close()


def test_remove_of_a_leased_value_takes_its_name_at_once(rig: NodeRig, caller: Caller) -> None:
    one, value, other = name(), os.urandom(2 * MIB), os.urandom(MIB)
    caller.put_large([one], [value])
    found = caller.find([one])
    assert caller.ask(Remove(op=1, names=one)).outcomes == bytes([OK])
    assert caller.ask(Remove(op=1, names=one)).outcomes == bytes([MISSING])
    assert caller.put([one], [other]) == [OK]
    assert caller.read(found, 0, 3, SLICE_BYTES) == value[3 * SLICE_BYTES :]
    caller.lane.send(Return(lease=found.lease))
    assert caller.get([one]) == [other]
    assert rig.census()["values"] == 1


def test_invalidate_takes_all_and_ends_puts_under_way(rig: NodeRig, caller: Caller) -> None:
    names, value = [name() for _ in range(300)], os.urandom(2 * MIB)
    caller.put(names, [bytes([i % 256]) * 10 for i in range(300)])
    granted = caller.offer([name()], [len(value)])
    caller.slices(granted.put, 0, value)
    done = caller.ask(Invalidate(op=1, everywhere=False))
    assert done.places == {"n1/dram": 300}
    assert caller.seal(granted.put, [value]).outcomes == bytes([Outcome.STALE])
    assert caller.ask(Exists(op=1, names=b"".join(names))).tiers == bytes(300)
    assert rig.census()["values"] == 0
    assert rig.census()["used_bytes"] == 0
    assert caller.put(names[:1], [b"new"]) == [OK]
    assert caller.get(names[:2]) == [b"new", MISSING]


def test_one_scope_does_not_see_the_other(rig: NodeRig, caller: Caller) -> None:
    other = Caller(rig.node.address, Credentials(tenant="other"))
    one = name()
    caller.put([one], [b"mine"])
    assert other.get([one]) == [MISSING]
    assert other.ask(Exists(op=1, names=one)).tiers == bytes(1)
    assert other.ask(Remove(op=1, names=one)).outcomes == bytes([MISSING])
    assert caller.get([one]) == [b"mine"]
    other.close()


def test_killed_and_started_again_it_has_what_it_had(start: Start) -> None:
    rig = start()
    caller = Caller(rig.node.address)
    names, values = [name() for _ in range(20)], [os.urandom(3 * MIB // (i + 1)) for i in range(20)]
    for one, value in zip(names, values, strict=True):
        caller.put_large([one], [value])
    caller.ask(Remove(op=1, names=names[3]))
    unfinished = caller.offer([name()], [MIB])
    assert unfinished.put
    rig.node.stop(keep=True)
    caller.close()
    rig.again()
    caller = Caller(rig.node.address)
    assert rig.counter("adopted") == 19
    for i, (one, value) in enumerate(zip(names, values, strict=True)):
        assert caller.get_large(one) == (MISSING if i == 3 else value)
    assert caller.put_large([names[3]], [values[3]]) == [OK]
    rows = caller.ask(Listing(op=1)).rows
    assert sorted(row[0] for row in rows) == sorted(names)
    caller.ask(Invalidate(op=1, everywhere=False))
    caller.put([names[0]], [b"later"])
    caller.close()
    rig.node.stop(keep=True)
    rig.again()
    caller = Caller(rig.node.address)
    assert [caller.get([one])[0] for one in names[:2]] == [b"later", MISSING]
    caller.close()


def test_a_full_arena_is_full_after_a_restart_too(start: Start) -> None:
    rig = start(16 * MIB)
    caller = Caller(rig.node.address)
    names, values = [name() for _ in range(4)], [os.urandom(4 * MIB) for _ in range(4)]
    assert caller.put_large(names, values) == [OK] * 4
    assert rig.census()["free_bytes"] == 0
    caller.close()
    rig.node.stop(keep=True)
    rig.again()
    caller = Caller(rig.node.address)
    assert rig.census()["free_bytes"] == 0
    assert caller.put([name()], [os.urandom(MIB)]) == [OK]
    got = [caller.get_large(one) for one in names]
    assert sorted(one == MISSING for one in got) == [False, False, False, True]
    assert all(one in (value, MISSING) for one, value in zip(got, values, strict=True))
    caller.close()


def test_counts_add_up(rig: NodeRig, caller: Caller) -> None:
    one = name()
    caller.put([one, one, name()], [b"a", b"b", b"c"])
    caller.get([one, name()])
    caller.put_large([one, name()], [b"a", bytes(MIB)])
    counters = rig.node.stat().counters
    for call in ("put", "get"):
        asked = sum(v for k, v in counters.items() if k.startswith("asked{") and f"call={call}" in k)
        items = sum(v for k, v in counters.items() if k.startswith("items{") and f"call={call}" in k)
        assert asked == items > 0


def test_nonsense_ends_the_lane_and_nothing_else(rig: NodeRig, caller: Caller) -> None:
    one = name()
    caller.put([one], [b"value"])
    for message in (
        Offer(op=1, names=b"short", sizes=[1]),
        Offer(op=1, names=one, sizes=[-1]),
        Put(offer=Offer(op=1, names=one, sizes=[17 * MIB])),
        Put(offer=Offer(op=1, names=one, sizes=[2]), sums=[0, 0]),
        Slice(put=77, item=0, slice=0, sum=0),
        Exists(op=1, names=b"x"),
        Denied(reason="I am a node"),
    ):
        stranger = Caller(rig.node.address)
        stranger.lane.send(message)
        assert isinstance(stranger.lane.receive(), Denied)
        with pytest.raises(Unavailable):
            stranger.lane.receive()
        stranger.close()
    assert caller.seal(77, []).outcomes == b""
    assert caller.get([one]) == [b"value"]


def test_an_arena_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = StoreConfig(dram_bytes=1 << 50, listen="127.0.0.1:0")
    arena = arena_path("huge")
    with pytest.raises(ConfigError, match="dram_bytes"):
        NodeRig(tmp_path, arena, config)
    assert not os.path.exists(arena)


def test_an_address_in_use_is_said(rig: NodeRig, tmp_path: Path) -> None:
    config = StoreConfig(dram_bytes=MIB, listen=rig.node.address)
    arena = arena_path("second")
    (tmp_path / "second").mkdir()
    with pytest.raises(Unavailable, match="cannot listen"):
        NodeRig(tmp_path / "second", arena, config)
    assert not os.path.exists(arena)
    with pytest.raises(ConfigError, match="running node"):
        NodeRig(tmp_path / "second", rig.arena, config)


def test_numbers_that_are_none_wait_for_nothing(rig: NodeRig, caller: Caller) -> None:
    one, nan = name(), float("nan")
    assert caller.put_large([one], [bytes(60 * MIB)]) == [OK]
    assert caller.ask(Pin(op=1, names=one, seconds=nan)).outcomes == bytes([OK])
    assert rig.census()["pins"] == 0
    found = caller.find([one])
    assert caller.put_large([name()], [bytes(60 * MIB)], wait_s=nan) == [FULL]
    caller.lane.send(Return(lease=found.lease))


def test_answers_that_may_be_unread_are_held_a_while(rig: NodeRig, caller: Caller) -> None:
    """A caller with three requests under way has read the first when the fourth comes."""
    names = [name() for _ in range(8)]
    for one in names:
        caller.put([one], [os.urandom(100_000)])
    for one in names:
        caller.get([one])
    assert rig.census()["leases"] == 3
    caller.close()
    until(lambda: rig.census()["leases"] == 0, "they end with the lane")


def test_a_scope_without_values_is_forgotten(rig: NodeRig) -> None:
    for i in range(5):
        Caller(rig.node.address, Credentials(namespace=f"empty-{i}")).close()
    until(lambda: rig.census()["sessions"] == 0, "the callers are gone")
    assert list(rig.node.custody.shelf.scopes.states()) == []
    kept = Caller(rig.node.address, Credentials(namespace="kept"))
    kept.put([name()], [b"x"])
    kept.close()
    until(lambda: rig.census()["sessions"] == 0, "the caller is gone")
    assert len(list(rig.node.custody.shelf.scopes.states())) == 1


def test_a_node_stops_although_puts_wait(rig: NodeRig, caller: Caller) -> None:
    one = name()
    caller.put_large([one], [bytes(60 * MIB)])
    caller.find([one])
    writer = Caller(rig.node.address)
    writer.lane.send(Offer(op=1, names=name(), sizes=[60 * MIB], wait_s=60.0))
    until(lambda: rig.census()["waiting"] == 1, "the put waits")
    rig.node.stop()
    assert rig.node.custody.waiting == 0
    writer.close()
