"""Names are split over shards and their answers joined; an outbox says everything once, in an order that holds."""

from __future__ import annotations

import pytest

from anabranch.core.errors import ConfigError
from anabranch.store.directory import Directory
from anabranch.store.messages import Announce, Join, Places, Where
from anabranch.store.outbox import Holdings, Outbox
from anabranch.store.shards import Whereabouts, join, shard_addresses, shard_of, split
from anabranch.testing.store import chain

NAMES = chain("s", 500)
PACKED = b"".join(NAMES)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 256])
def test_every_name_has_one_shard_and_keeps_its_place(shards: int) -> None:
    parts = split(PACKED, shards)
    assert len(parts) == shards
    seen = {}
    for shard, (names, own) in enumerate(parts):
        for i, at in enumerate(range(500) if own is None else own):
            name = names[i * 32 : (i + 1) * 32]
            assert shard_of(name, shards) == shard
            seen[at] = name
    assert [seen[i] for i in range(500)] == NAMES


def test_answers_of_shards_are_joined_under_common_numbers_and_a_silent_one_is_unknown() -> None:
    parts = []
    for shard, (names, own) in enumerate(split(PACKED, 3)):
        if shard == 2:
            parts.append((Whereabouts(b"", unknown=True), own))
            continue
        directory = Directory(2.0, 0.0)
        for node in ("b", "a") if shard else ("a", "b"):
            directory.handle(node, Join(node_id=node, epoch=1, address=f"{node}:1", layout=b""), 5.0)
            held = names if node == "a" else names[: 32 * 10]
            directory.handle(node, Announce(seq=1, reset=True, added_names={"ssd": held}), 5.0)
        (places,) = directory.handle("x", Where(op=1, names=names), 5.0)
        assert isinstance(places, Places)
        parts.append((Whereabouts(places.places, places.members, places.unknown), own))
    whole = join(500, parts)
    for i, name in enumerate(NAMES):
        shard = shard_of(name, 3)
        assert ("a", "a:1", 2) in whole.holders(i) or shard == 2
        assert whole.known()[i] is (None if shard == 2 else True)
    assert sum(len(whole.holders(i)) == 2 for i in range(500)) == 20


@pytest.mark.parametrize("text", ["", "a:1,,b:2", "a:1,a:1"])
def test_bad_address_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="directory"):
        shard_addresses(text)


def test_an_outbox_keeps_the_order_that_matters() -> None:
    outbox = Outbox(0, 1)
    a, b = NAMES[:2]
    outbox.changed({"dram": a}, {}, {})
    outbox.changed({"dram": b}, {}, {2: b})
    outbox.changed({"ssd": a}, {"dram": a}, {})
    first, second = outbox.take()
    assert (first.seq, first.added_names, first.removed_names, first.wanted) == (1, {"dram": a + b}, {}, {2: b})
    assert (second.seq, second.added_names, second.removed_names) == (2, {"ssd": a}, {"dram": a})
    assert not outbox
    assert outbox.take() == []


def test_a_reset_is_complete_with_its_last_message_only() -> None:
    outbox = Outbox(1, 2)
    messages = list(outbox.reset(Holdings({"dram": PACKED, "ssd": PACKED}, {3: PACKED})))
    assert [m.reset for m in messages] == [True, False, False, False]
    assert [m.last for m in messages] == [False, False, False, True]
    own = split(PACKED, 2)[1][0]
    assert (messages[1].added_names, messages[2].added_names) == ({"dram": own}, {"ssd": own})
    assert messages[3].wanted == {3: own}
    (only,) = Outbox(0, 1).reset(Holdings({}))
    assert (only.reset, only.last) == (True, True)
