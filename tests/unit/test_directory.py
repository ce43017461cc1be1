"""Who holds what, learned from announcements."""

from __future__ import annotations

from anabranch.store.directory import Directory
from anabranch.store.messages import Announce, Heartbeat, Holders, Join, Lookup, Resync
from anabranch.testing.store import chain

LAYOUT = b"L" * 16
KEYS = chain("p", 6)


def join(directory: Directory, name: str, now: float = 0.0, layout: bytes = LAYOUT) -> None:
    directory.handle(name, Join(node_id=name, epoch=1, address=f"{name}:1", layout=layout), now)
    directory.handle(name, Announce(seq=1, reset=True), now)


def ask(directory: Directory, asker: str = "z", now: float = 0.0) -> Holders:
    return directory.lookup(asker, Lookup(op=7, keys=KEYS, layout=LAYOUT), now)


def test_runs_name_first_count_and_tier_of_every_other_node() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    join(directory, "b")
    directory.handle("a", Announce(seq=2, added={"dram": KEYS[:2], "ssd": KEYS[1:4]}), 0.0)
    directory.handle("b", Announce(seq=2, added={"ssd": KEYS[3:5]}), 0.0)
    found = {h.node_id: h for h in ask(directory).holdings}
    assert found["a"].runs == [(0, 2, "dram"), (2, 2, "ssd")]
    assert found["b"].runs == [(3, 2, "ssd")]
    assert found["b"].address == "b:1"
    assert [h.node_id for h in ask(directory, "a").holdings] == []  # nobody else has the first key


def test_a_removed_tier_leaves_the_other() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    directory.handle("a", Announce(seq=2, added={"dram": KEYS, "ssd": KEYS[:1]}), 0.0)
    directory.handle("a", Announce(seq=3, removed={"dram": KEYS}), 0.0)
    assert ask(directory).holdings[0].runs == [(0, 1, "ssd")]
    directory.handle("a", Announce(seq=4, removed={"ssd": KEYS}), 0.0)
    assert ask(directory).holdings == []
    assert directory.census()["blocks"] == 0


def test_a_gap_is_answered_with_resync_and_nothing_is_vouched_for_until_it_is_repaired() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    assert directory.handle("a", Announce(seq=2, added={"dram": KEYS}), 10.0) == []
    assert directory.handle("a", Announce(seq=4, removed={"dram": KEYS[2:]}), 10.0) == [Resync()]
    unknown = ask(directory, now=10.0)
    assert (unknown.holdings, unknown.complete) == ([], False)
    assert directory.handle("a", Announce(seq=5), 10.0) == []  # asked already
    assert directory.handle("a", Announce(seq=6, added={"dram": KEYS[:3]}, reset=True, last=False), 10.1) == []
    assert not ask(directory, now=10.1).complete
    directory.handle("a", Announce(seq=7, added={"ssd": KEYS[3:4]}), 10.1)
    known = ask(directory, now=10.1)
    assert known.holdings[0].runs == [(0, 3, "dram"), (3, 1, "ssd")]
    assert known.complete


def test_a_heartbeat_reveals_a_lost_last_announcement_and_a_lost_resync_is_repeated() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    assert directory.handle("a", Heartbeat(seq=1), 5.0) == []
    assert directory.handle("a", Heartbeat(seq=2), 5.5) == [Resync()]
    assert directory.handle("a", Heartbeat(seq=2), 6.0) == []
    assert directory.handle("a", Heartbeat(seq=2), 6.5) == [Resync()]


def test_a_silent_node_is_not_named_and_comes_back_when_heard() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    directory.handle("a", Announce(seq=2, added={"dram": KEYS}), 1.0)
    assert ask(directory, now=3.0).holdings
    assert not ask(directory, now=3.1).holdings
    directory.handle("a", Heartbeat(seq=2), 4.0)
    assert ask(directory, now=4.0).holdings


def test_a_new_connection_of_a_node_replaces_the_old_one() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    directory.handle("a", Announce(seq=2, added={"dram": KEYS}), 0.0)
    directory.handle("new", Join(node_id="a", epoch=2, address="a:2", layout=LAYOUT), 0.0)
    directory.handle("new", Announce(seq=1, added={"dram": KEYS[:1]}, reset=True), 0.0)
    assert directory.handle("a", Announce(seq=3, added={"dram": KEYS}), 0.0) == []
    (holding,) = ask(directory).holdings
    assert (holding.address, holding.runs) == ("a:2", [(0, 1, "dram")])
    directory.gone("new")
    assert directory.census() == {"nodes": 0, "synced_nodes": 0, "blocks": 0}


def test_another_layout_is_another_world() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a", layout=b"M" * 16)
    directory.handle("a", Announce(seq=2, added={"dram": KEYS}), 0.0)
    assert ask(directory).holdings == []


def test_a_young_directory_says_that_absence_proves_nothing() -> None:
    directory = Directory(2.0, 100.0)
    assert not ask(directory, now=101.0).complete
    assert ask(directory, now=102.0).complete
