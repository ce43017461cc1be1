"""Which source a block range comes from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.policy.paths import OWN_SSD, Source, SourceRun, longest_runs


def test_the_longest_run_wins_and_the_next_source_goes_on_from_there() -> None:
    sources = [Source(OWN_SSD, [(0, 3)]), Source("a", [(0, 5)], 1.0), Source("b", [(4, 6)], 1.0)]
    assert longest_runs(20, sources) == [SourceRun("a", 0, 5), SourceRun("b", 5, 5)]


def test_among_equals_the_cheaper_one_wins() -> None:
    assert longest_runs(4, [Source("a", [(0, 4)], 1.0), Source(OWN_SSD, [(0, 9)])]) == [SourceRun(OWN_SSD, 0, 4)]


def test_nothing_behind_a_hole_is_planned() -> None:
    assert longest_runs(9, [Source("a", [(1, 8)])]) == []
    assert longest_runs(9, [Source("a", [(0, 2), (3, 6)])]) == [SourceRun("a", 0, 2)]
    assert longest_runs(9, []) == []


@given(st.integers(0, 12), st.lists(st.sets(st.integers(0, 12)), max_size=4))
def test_a_plan_is_the_longest_prefix_that_all_sources_together_hold(wanted: int, holdings: list[set[int]]) -> None:
    sources = [Source(str(i), [(at, 1) for at in sorted(held)]) for i, held in enumerate(holdings)]
    union = set().union(*holdings)
    reach = next((i for i in range(wanted) if i not in union), wanted)
    plan = longest_runs(wanted, sources)
    assert [i for run in plan for i in range(run.first, run.first + run.count)] == list(range(reach))
    assert all(set(range(r.first, r.first + r.count)) <= holdings[int(r.node)] for r in plan)
