"""Who holds what, learned from announcements."""

from __future__ import annotations

from collections import Counter

from anabranch.store.directory import Directory
from anabranch.store.messages import (
    Announce,
    Heartbeat,
    Holders,
    Join,
    Lookup,
    NameTaken,
    Places,
    Repair,
    Resync,
    Where,
)
from anabranch.store.shards import Whereabouts
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


def test_a_second_node_of_the_same_name_waits_until_the_first_is_gone() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    directory.handle("a", Announce(seq=2, added={"dram": KEYS}), 0.0)
    second = Join(node_id="a", epoch=2, address="a:2", layout=LAYOUT)
    assert directory.handle("new", second, 1.0) == [NameTaken(address="a:1")]
    assert directory.handle("new", Announce(seq=1, added={"dram": KEYS}, reset=True), 1.0) == []
    directory.gone("new", 1.0)
    assert [holding.address for holding in ask(directory, now=1.0).holdings] == ["a:1"]
    directory.handle("a", Heartbeat(seq=2), 1.5)
    assert directory.handle("new", second, 3.5) == [NameTaken(address="a:1")]
    directory.gone("a", 3.6)
    assert directory.handle("new", second, 3.6) == []
    assert directory.census()["nodes"] == 1


def test_a_silent_node_gives_way_to_its_next_life() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    assert directory.handle("new", Join(node_id="a", epoch=2, address="a:2", layout=LAYOUT), 2.1) == []
    assert directory.members.get("a") is None


def test_a_new_connection_of_a_node_replaces_the_old_one() -> None:
    directory = Directory(2.0, 0.0)
    join(directory, "a")
    directory.handle("a", Announce(seq=2, added={"dram": KEYS}), 0.0)
    directory.handle("new", Join(node_id="a", epoch=1, address="a:2", layout=LAYOUT), 0.0)
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


def rows(directory: Directory, names: list[bytes], now: float = 10.0) -> Whereabouts:
    (places,) = directory.handle("client", Where(op=1, names=b"".join(names)), now)
    assert isinstance(places, Places)
    return Whereabouts(places.places, places.members, places.unknown)


def value_node(directory: Directory, name: str, held: list[bytes], now: float = 10.0, replicas: int = 1) -> None:
    directory.handle(name, Join(node_id=name, epoch=1, address=f"{name}:1", layout=b"", replicas=replicas), now)
    directory.handle(name, Announce(seq=1, reset=True, added_names={"dram": b"".join(held)}), now)
    directory.handle(name, Heartbeat(seq=1, free_bytes=50, total_bytes=100), now)


def test_where_names_holders_and_tiers_and_stops_a_run_at_the_first_that_nobody_holds() -> None:
    directory = Directory(2.0, 0.0)
    value_node(directory, "a", KEYS[:2])
    value_node(directory, "b", [KEYS[1], KEYS[3]])
    directory.handle("b", Announce(seq=2, added_names={"ssd": KEYS[1]}, removed_names={"dram": KEYS[3]}), 10.0)
    found = rows(directory, KEYS)
    assert found.holders(0) == [("a", "a:1", 1)]
    assert sorted(found.holders(1)) == [("a", "a:1", 1), ("b", "b:1", 3)]
    assert found.known() == [True, True, False, False, False, False]
    (run,) = directory.handle("x", Where(op=2, names=b"".join(KEYS), run=True), 10.0)
    assert isinstance(run, Places)
    assert len(run.places) == 2 * 8


def test_absence_is_unknown_until_every_node_has_announced_and_while_one_may_come_back() -> None:
    directory = Directory(2.0, 0.0)
    value_node(directory, "a", KEYS[:1], 1.0)
    assert rows(directory, KEYS[:2], 1.0).known() == [True, None]  # young
    directory.handle("a", Heartbeat(seq=1), 3.0)
    assert rows(directory, KEYS[:2], 3.0).known() == [True, False]
    directory.handle("b", Join(node_id="b", epoch=1, address="b:1", layout=b""), 3.0)
    assert rows(directory, KEYS[:2], 3.0).known() == [True, None]
    directory.handle("b", Announce(seq=1, reset=True, added_names={"ssd": KEYS[1]}, last=False), 3.0)
    assert rows(directory, KEYS[:3], 3.0).known() == [True, True, None]  # what was said so far is true
    directory.handle("b", Announce(seq=2), 3.0)
    assert rows(directory, KEYS[:3], 3.0).known() == [True, True, False]
    directory.gone("b", 3.0)
    assert rows(directory, KEYS[:2], 3.0).known() == [True, None]
    directory.handle("a", Heartbeat(seq=1), 5.0)
    directory.tick(5.1)
    assert rows(directory, KEYS[:2], 5.1).known() == [True, False]
    assert rows(directory, KEYS[:1], 7.1).known() == [None]  # nobody hears of a


def test_a_directory_that_knows_the_membership_need_not_be_old_to_be_sure() -> None:
    directory = Directory(2.0, 0.0)
    directory.expect({"a", "b"})
    value_node(directory, "a", KEYS[:1], 0.1)
    assert rows(directory, KEYS[:2], 0.1).known() == [True, None]
    value_node(directory, "b", [], 0.2)
    assert rows(directory, KEYS[:2], 0.2).known() == [True, False]


def settle(directory: Directory, now: float) -> list[tuple[object, Repair]]:
    hints, more = [], True
    while more:
        messages, more = directory.tick(now)
        hints += [(connection, message) for connection, message in messages if isinstance(message, Repair)]
    return hints


def test_a_lost_nodes_replicas_are_made_again_on_nodes_that_lack_them() -> None:
    directory = Directory(2.0, 0.0)
    names = chain("v", 300)
    value_node(directory, "a", names, replicas=2)
    value_node(directory, "b", names[:200], replicas=2)
    value_node(directory, "c", names[200:280], replicas=2)
    settle(directory, 10.0)
    directory.gone("a", 10.0)
    assert settle(directory, 11.0) == []  # it may come back
    for node in "bc":
        directory.handle(node, Heartbeat(seq=1, free_bytes=50, total_bytes=100), 12.0)
    hints = settle(directory, 12.1)
    asked = Counter({("b", "c"): 0})
    for source, hint in hints:
        asked[source, hint.target] += len(hint.names) // 32
    assert asked == {("b", "c"): 200, ("c", "b"): 80}
    assert directory.counters["names_lost"] == 20
    assert len(directory.table) == 280
    for node in "bc":
        directory.handle(node, Heartbeat(seq=1, free_bytes=50, total_bytes=100), 23.0)
    again = settle(directory, 23.0)  # nobody followed
    assert sum(len(hint.names) // 32 for _, hint in again) == 280
    assert {(source, hint.target) for source, hint in again} == {("b", "c"), ("c", "b")}


def test_a_new_directory_looks_once_for_replicas_that_were_lost_before_it() -> None:
    directory = Directory(2.0, 0.0)
    names = chain("v", 50)
    value_node(directory, "a", names, 1.0, replicas=2)
    value_node(directory, "b", names[:30], 1.0, replicas=2)
    assert settle(directory, 1.0) == []  # another one may still announce
    for node in "ab":
        directory.handle(node, Heartbeat(seq=1), 2.5)
    asked = b"".join(hint.names for _, hint in settle(directory, 2.5))
    assert sorted(asked[at : at + 32] for at in range(0, len(asked), 32)) == sorted(names[30:])


def test_a_node_that_comes_back_with_less_is_repaired_and_with_everything_is_not() -> None:
    directory = Directory(2.0, 0.0)
    names = chain("v", 40)
    value_node(directory, "a", names, replicas=2)
    value_node(directory, "b", names, replicas=2)
    settle(directory, 10.0)
    directory.gone("a", 10.0)
    value_node(directory, "a", names[:30], 10.5, replicas=2)
    hints = settle(directory, 10.5)
    assert {(source, hint.target) for source, hint in hints} == {("b", "a")}
    asked = b"".join(hint.names for _, hint in hints)
    assert sorted(asked[at : at + 32] for at in range(0, len(asked), 32)) == sorted(names[30:])
    directory.handle("a", Announce(seq=2, added_names={"dram": asked}), 10.6)
    directory.gone("b", 10.6)
    value_node(directory, "b", names, 10.7, replicas=2)
    assert settle(directory, 10.7) == []


def test_single_names_may_want_more_replicas_than_their_node_says() -> None:
    directory = Directory(2.0, 0.0)
    for node in "abc":
        value_node(directory, node, KEYS[:2])
    directory.handle("b", Announce(seq=2, added_names={"dram": KEYS[1]}, wanted={3: KEYS[1]}), 10.0)
    settle(directory, 10.0)
    value_node(directory, "d", [])
    directory.gone("a", 10.0)
    for node in "bcd":
        directory.handle(node, Heartbeat(seq=2 if node == "b" else 1), 12.0)
    ((_, hint),) = settle(directory, 12.1)
    assert (hint.target, hint.names) == ("d", KEYS[1])


def test_a_big_announcement_is_worked_on_in_steps_between_which_others_are_answered() -> None:
    directory = Directory(2.0, 0.0)
    value_node(directory, "a", KEYS[:1])
    names = chain("big", 10_000)
    steps = directory.steps("a", Announce(seq=2, added={"dram": names}), 10.0)
    next(steps)
    assert rows(directory, [names[0], names[-1]]).known() == [True, False]
    assert len(list(steps)) == 2
    assert rows(directory, [names[0], names[-1]]).known() == [True, True]


def test_a_survivor_gets_few_hints_at_a_time_and_the_next_when_the_target_has_the_copies() -> None:
    directory = Directory(2.0, 0.0)
    names = chain("many", 6000)
    value_node(directory, "a", names, replicas=2)
    value_node(directory, "b", [], replicas=2)
    settle(directory, 10.0)
    directory.gone("b", 10.0)
    value_node(directory, "c", [], 10.0)  # the audit at 10.0 had b in mind
    copied: set[bytes] = set()
    now, most, seq = 10.0, 0, 1
    while len(copied) < 6000:
        now += 0.5
        assert now < 60.0
        directory.handle("a", Heartbeat(seq=1), now)
        hints = settle(directory, now)
        most = max(most, len(hints))
        for source, hint in hints:
            assert (source, hint.target) == ("a", "c")
            copied.update(hint.names[at : at + 32] for at in range(0, len(hint.names), 32))
            seq += 1
            directory.handle("c", Announce(seq=seq, added_names={"dram": hint.names}), now)
        directory.handle("c", Heartbeat(seq=seq), now)
    assert most == 4
    directory.handle("a", Heartbeat(seq=1), now + 1.0)
    assert settle(directory, now + 1.0) == []
