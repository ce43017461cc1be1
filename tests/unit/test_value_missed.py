"""What a node remembers for those that were away."""

from __future__ import annotations

from pathlib import Path

from anabranch.store.values.live.node_missed import EventFile
from anabranch.store.values.missed import MAX_NAMES, Event, MissedLog


def test_an_event_is_known_once_and_found_by_its_time() -> None:
    log = MissedLog()
    assert log.since(0.0) == ([], True), "a new node has forgotten nothing"
    early, late = Event(10.0, b"1", names=bytes(32)), Event(20.0, b"2", tenant="t", epoch="e")
    assert [log.add(one) for one in (early, late, early)] == [True, True, False]
    assert log.since(15.0) == ([late], True)
    assert log.since(float("nan"))[0] == []
    assert log.unknown([early, Event(1.0, b"3")]) == [Event(1.0, b"3")]


def test_what_is_forgotten_is_said() -> None:
    log = MissedLog()
    for i in range(3):
        log.add(Event(i + 1.0, bytes([i]), names=bytes(32) * (MAX_NAMES // 2)))
    assert len(log) == 2
    assert log.since(0.0)[1] is False
    assert log.since(1.5)[1] is True


def test_it_outlives_the_process_and_a_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "missed"
    file = EventFile(str(path))
    events = [Event(float(i), bytes([i + 1]), names=bytes(32)) for i in range(3)]
    for event in events:
        file.add(event)
    file.close()
    path.write_bytes(path.read_bytes()[:-5])
    again = EventFile(str(path))
    assert list(again.log.events) == events[:2]
    again.log.dropped = 7.0
    again._rewrite()
    again.close()
    third = EventFile(str(path))
    assert (list(third.log.events), third.log.dropped) == (events[:2], 7.0)
    third.close()
