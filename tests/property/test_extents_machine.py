"""Extents against a plain map of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import InvariantBroken
from anabranch.paging.extents import GRAIN, PAGE, Extents, rounded

SIZES = st.one_of(st.integers(0, 200), st.integers(PAGE - 1, 3 * PAGE + 1), st.sampled_from([64, PAGE, 8 * PAGE]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1 << 16)), max_size=120))
def test_nothing_overlaps_and_all_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents(16 * PAGE)
    taken: list[tuple[int, int]] = []
    for give, size, pick in steps:
        if give and taken:
            extents.give(*taken.pop(pick % len(taken)))
        else:
            start = extents.take(size)
            if start is None:
                fits = [e - s for s, e in extents.holes() if e - s >= rounded(size)]
                assert all(length < rounded(size) + PAGE for length in fits), (
                    "a range that fits in any case was not used"
                )
                assert not fits or rounded(size) >= PAGE
            else:
                assert start % (PAGE if size >= PAGE else GRAIN) == 0
                assert 0 <= start <= extents.size - rounded(size)
                assert all(start + rounded(size) <= s or s + rounded(n) <= start for s, n in taken)
                taken.append((start, size))
        extents.check()
        assert extents.free == extents.size - sum(rounded(n) for _, n in taken)
    again, kept = Extents.around(16 * PAGE, taken)
    again.check()
    assert all(kept) or not taken
    assert sorted(again.holes()) == sorted(extents.holes())
    for start, size in taken:
        extents.give(start, size)
    assert list(extents.holes()) == [(0, extents.size)]


def test_small_and_large_ones_come_from_opposite_ends() -> None:
    extents = Extents(64 * PAGE)
    assert [extents.take(100), extents.take(100)] == [0, 128]
    assert [extents.take(PAGE), extents.take(PAGE)] == [63 * PAGE, 62 * PAGE]


def test_the_hole_of_an_equal_value_is_used_first() -> None:
    extents = Extents(64 * PAGE)
    starts = [extents.take(2 * PAGE) for _ in range(8)]
    extents.give(starts[3] or 0, 2 * PAGE)
    assert extents.take(2 * PAGE) == starts[3]


def test_overlapping_values_of_a_former_life_are_refused() -> None:
    _, kept = Extents.around(16 * PAGE, [(0, 100), (64, 100), (PAGE, PAGE), (PAGE + 64, PAGE), (15 * PAGE, 2 * PAGE)])
    assert kept == [True, False, True, False, False]


def test_double_free_is_a_bug() -> None:
    extents = Extents(16 * PAGE)
    start = extents.take(100)
    assert start is not None
    extents.give(start, 100)
    with pytest.raises(InvariantBroken):
        extents.give(start, 100)
