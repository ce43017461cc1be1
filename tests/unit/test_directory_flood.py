"""What a flood of nodes does to a directory (found by `make fuzz`)."""

from __future__ import annotations

import pytest

from anabranch.core.errors import Overloaded
from anabranch.store.directory import Directory
from anabranch.store.members import MAX_NUMBERS
from anabranch.store.messages import Join


def test_a_directory_full_of_silent_nodes_forgets_them_and_takes_new_ones() -> None:
    directory = Directory(2.0, 0.0)
    for number in range(MAX_NUMBERS):
        directory.handle(number, Join(node_id=f"n{number}", epoch=1, address="x", layout=b""), 0.1)
    with pytest.raises(Overloaded):
        directory.handle("late", Join(node_id="late", epoch=1, address="x", layout=b""), 0.2)
    now, more = 10.0, True
    while more:
        now += 0.1
        more = directory.tick(now)[1]
    assert directory.handle("late", Join(node_id="late", epoch=1, address="x", layout=b""), now) == []
    assert directory.members.named("late") is not None
