"""Copies go where there is room, without a herd, and everybody who decides decides alike."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.policy.placement import Candidate, choose, heir, shares
from anabranch.testing.store import chain

NAMES = chain("placement", 4000)


def node(name: str, free: int, total: int = 1000) -> Candidate:
    return Candidate(name, free, total)


def test_the_local_node_comes_first_and_nobody_twice() -> None:
    nodes = [node("a", 500), node("b", 500), node("c", 500)]
    for name in NAMES[:50]:
        chosen = choose(nodes, 3, "b", name)
        assert chosen[0].node_id == "b"
        assert len({c.node_id for c in chosen}) == 3
    assert len(choose(nodes, 9, "z", NAMES[0])) == 3
    assert choose([], 2, "a", NAMES[0]) == []
    assert choose(nodes, 0, "b", NAMES[0]) == []


def test_the_same_name_and_nodes_give_the_same_choice_in_any_order() -> None:
    nodes = [node(f"n{i}", 100 * i) for i in range(1, 9)]
    for name in NAMES[:100]:
        assert choose(nodes, 3, "n5", name) == choose(nodes[::-1], 3, "n5", name)
        assert heir(nodes, shares(nodes), name, frozenset()) == heir(
            nodes[::-1], shares(nodes[::-1]), name, frozenset()
        )


def test_a_new_empty_node_is_preferred_but_gets_no_herd() -> None:
    nodes = [node(f"n{i}", 100) for i in range(9)] + [node("new", 1000)]
    first = Counter(choose(nodes, 1, "elsewhere", name)[0].node_id for name in NAMES)
    assert first["new"] / len(NAMES) == pytest.approx(2 / 10, abs=0.03)
    assert max(count for name, count in first.items() if name != "new") < 0.13 * len(NAMES)


def test_repairs_are_spread_in_proportion_to_free_bytes_within_twice_an_equal_share() -> None:
    nodes = [node("a", 100), node("b", 200), node("c", 300), node("d", 400)]
    weights = shares(nodes)
    assert weights == pytest.approx([0.1, 0.2, 0.3, 0.4])
    got = Counter(found.node_id for name in NAMES if (found := heir(nodes, weights, name, frozenset())))
    assert [got[n] / len(NAMES) for n in "abcd"] == pytest.approx(weights, abs=0.03)
    herd = shares([node("a", 10), node("b", 10), node("c", 10), node("new", 10_000, 10_000)])
    assert max(herd) == pytest.approx(0.5)
    assert shares([]) == []
    assert shares([node("a", 0), node("b", 0)]) == pytest.approx([0.5, 0.5])


def test_an_heir_is_never_somebody_who_holds_it_already() -> None:
    nodes = [node("a", 1000), node("b", 1)]
    assert {heir(nodes, shares(nodes), name, frozenset({"a"})).node_id for name in NAMES[:100]} == {"b"}  # type: ignore[union-attr]
    assert heir(nodes, shares(nodes), NAMES[0], frozenset({"a", "b"})) is None
