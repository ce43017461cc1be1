from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.policy.batching import affordable, chunk_cost, share_quota


def test_cost_grows_with_the_context() -> None:
    assert chunk_cost(0, 1, 1000.0) == 1.0
    assert chunk_cost(1000, 1, 1000.0) == 2.0
    assert chunk_cost(500, 3, 1000.0) == sum(1 + p / 1000 for p in (500, 501, 502))


@given(start=st.integers(0, 200_000), quota=st.floats(0, 10_000), context=st.floats(1, 100_000))
def test_affordable_is_the_largest_count_within_the_quota(start: int, quota: float, context: float) -> None:
    count = affordable(start, quota, context)
    assert count == 0 or chunk_cost(start, count, context) <= quota
    assert chunk_cost(start, count + 1, context) > quota


def share(decodes: list[int], prefills: list[tuple[int, int]], quota: float) -> list[int]:
    return share_quota(decodes, prefills, quota=quota, cost_context=1e9, block_tokens=4)


def test_decode_goes_first_and_prefill_in_order() -> None:
    assert share([0, 0], [(0, 5), (0, 100), (0, 9)], 22.5) == [5, 12, 0]


def test_chunks_end_at_block_boundaries_unless_they_end_the_prompt() -> None:
    assert share([], [(2, 100)], 13.5) == [10]
    assert share([], [(2, 13)], 13.5) == [13]
    assert share([], [(1, 100)], 2.5) == [3]


def test_the_first_prefill_is_never_starved() -> None:
    assert share([0] * 50, [(0, 100), (0, 100)], 10) == [4, 0]


@given(
    decodes=st.lists(st.integers(0, 5000), max_size=20),
    prefills=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 5000)), max_size=8),
    quota=st.integers(1, 2000),
)
def test_the_quota_holds_but_for_the_first_block(
    decodes: list[int], prefills: list[tuple[int, int]], quota: int
) -> None:
    counts = share_quota(decodes, prefills, quota=float(quota), cost_context=3000.0, block_tokens=16)
    assert len(counts) == len(prefills)
    assert all(0 <= count <= remaining for count, (_, remaining) in zip(counts, prefills, strict=True))
    spent = sum(chunk_cost(p, 1, 3000.0) for p in decodes)
    spent += sum(chunk_cost(start, n, 3000.0) for n, (start, _) in zip(counts, prefills, strict=True))
    first = chunk_cost(prefills[0][0], 16, 3000.0) if prefills else 0.0
    assert spent <= max(quota, sum(chunk_cost(p, 1, 3000.0) for p in decodes) + first) + 1e-6
    assert not prefills or counts[0] > 0
