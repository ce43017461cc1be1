"""Scaled sessions keep who shares what with whom; fast statistics equal slow ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import InvalidInput
from anabranch.traces.schema import TraceRequest, common_blocks, ranges_of
from anabranch.traces.stats import IdealCache, ideal_block_hits, percentile
from anabranch.traces.synth import block_tokens_of, scale_factor, scale_session

IDS = st.lists(st.integers(0, 12), max_size=12)
BLOCK = 16


@st.composite
def sessions(draw: st.DrawFn) -> list[TraceRequest]:
    """Agents whose prompts grow, sometimes from another point on; ids mean prefixes, as in recorded traces."""
    names: dict[tuple[int, ...], int] = {}
    requests: list[TraceRequest] = []
    latest: dict[str, tuple[int, ...]] = {}
    for index in range(draw(st.integers(1, 8))):
        agent = draw(st.sampled_from(["main", "main/1"]))
        before = latest.get(agent, ())
        keep = draw(st.integers(0, len(before)))
        content = before[:keep] + tuple(draw(st.lists(st.integers(0, 2), max_size=5)))
        latest[agent] = content
        ids = [names.setdefault(content[: place + 1], len(names)) for place in range(len(content))]
        tail = draw(st.integers(0 if content else 1, BLOCK - 1))
        requests.append(
            TraceRequest(
                t_s=float(index),
                session="s",
                agent=agent,
                input_tokens=len(content) * BLOCK + tail,
                output_tokens=draw(st.integers(0, 50)),
                block_tokens=BLOCK,
                ranges=ranges_of(ids),
            )
        )
    return requests


def common_tokens(one: list[int], other: list[int]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


@given(IDS, IDS)
def test_ranges_are_the_list_they_stand_for(one: list[int], other: list[int]) -> None:
    request = TraceRequest(t_s=0, session="", input_tokens=0, output_tokens=0, ranges=ranges_of(one))
    assert request.block_ids() == one
    assert request.blocks == len(one)
    assert common_blocks(ranges_of(one), ranges_of(other)) == common_tokens(one, other)


@given(st.integers(0, 2**63 - 1), st.integers(0, 40), st.integers(0, 40), st.integers(0, 3))
def test_fewer_tokens_of_a_block_are_a_prefix_of_more(block: int, few: int, more: int, seed: int) -> None:
    vocabulary = range(5, 90)
    tokens = block_tokens_of(block, few + more, vocabulary, seed=seed)
    assert block_tokens_of(block, few, vocabulary, seed=seed) == tokens[:few]
    assert all(token in vocabulary for token in tokens)


def test_tokens_of_a_block_never_change() -> None:
    assert block_tokens_of(7, 4) == [1453, 18244, 1483, 25767]
    assert block_tokens_of(7, 4, seed=1) != block_tokens_of(7, 4)
    with pytest.raises(InvalidInput):
        block_tokens_of(7, 4, range(5, 5))


@given(sessions(), st.integers(20, 400), st.integers(1, 19))
def test_scaling_keeps_the_prefix_structure(requests: list[TraceRequest], context: int, max_output: int) -> None:
    factor = scale_factor(requests, context, max_output)
    turns = scale_session(requests, context=context, max_output=max_output)
    prompts = [turn.prompt() for turn in turns]
    for request, turn, prompt in zip(requests, turns, prompts, strict=True):
        assert len(prompt) == turn.input_tokens == max(1, int(request.input_tokens * factor))
        assert 1 <= turn.output_tokens <= max_output
        assert len(prompt) + max_output <= context
    for later in range(len(turns)):
        for earlier in range(later):
            blocks = common_blocks(requests[earlier].ranges, requests[later].ranges)
            shared = min(int(blocks * BLOCK * factor), len(prompts[earlier]), len(prompts[later]))
            assert common_tokens(prompts[earlier], prompts[later]) >= shared


@given(sessions(), st.integers(20, 400))
def test_a_turn_that_goes_on_extends_the_whole_prompt(requests: list[TraceRequest], context: int) -> None:
    prompts = [turn.prompt() for turn in scale_session(requests, context=context, max_output=8)]
    latest: dict[str, int] = {}
    for index, request in enumerate(requests):
        before = latest.get(request.agent)
        latest[request.agent] = index
        if before is None:
            continue
        blocks = requests[before].blocks
        if common_blocks(requests[before].ranges, request.ranges) == blocks < request.blocks:
            assert prompts[index][: len(prompts[before])] == prompts[before]


def test_no_room_is_an_error() -> None:
    with pytest.raises(InvalidInput, match="no room"):
        scale_factor([], 16, 16)


@given(sessions())
def test_fast_hits_equal_the_definition(requests: list[TraceRequest]) -> None:
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        ids = request.block_ids()
        run = 0
        while run < len(ids) and ids[run] in seen:
            run += 1
        hits, total = hits + run, total + len(ids)
        seen.update(ids)
    assert ideal_block_hits(requests) == (hits, total)


@given(st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=6), st.integers(1, 4))
def test_ideal_cache_equals_the_definition(prompts: list[list[int]], block: int) -> None:
    cache = IdealCache(block)
    before: list[list[int]] = []
    for prompt in prompts:
        common = max((common_tokens(prompt, other[: len(other) // block * block]) for other in before), default=0)
        limit = max(0, len(prompt) - 1)
        assert cache.hit_tokens(prompt) == min(common // block, limit // block) * block
        cache.add(prompt)
        before.append(prompt)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.9) == pytest.approx(1.9)
    assert math.isnan(percentile([], 0.5))
