"""What a workload offers a cache: the hits that an unlimited one would have, and summaries of measured values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from anabranch.blocks.hashing import KEY_BYTES, PrefixChain
from anabranch.traces.schema import Ranges, TraceRequest, common_blocks

_ROOT = bytes(KEY_BYTES)


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`ideal_hit`: share of blocks that an unlimited cache would have had; None if the trace has no block ids."""

    requests: int
    sessions: int
    duration_s: float
    mean_input_tokens: float
    mean_output_tokens: float
    blocks: int
    ideal_hit: float | None


def summarize(requests: Sequence[TraceRequest]) -> TraceSummary:
    count = max(1, len(requests))
    hits, blocks = ideal_block_hits(requests)
    return TraceSummary(
        requests=len(requests),
        sessions=len({request.session for request in requests}),
        duration_s=max((request.t_s for request in requests), default=0.0),
        mean_input_tokens=sum(request.input_tokens for request in requests) / count,
        mean_output_tokens=sum(request.output_tokens for request in requests) / count,
        blocks=blocks,
        ideal_hit=hits / blocks if blocks else None,
    )


def ideal_block_hits(requests: Iterable[TraceRequest]) -> tuple[int, int]:
    """(hits, blocks) of the trace's own blocks, in order: a hit is a block of the longest prefix seen before.

    Linear in the blocks that are new against the same agent's last request, not in all blocks."""
    seen: set[int] = set()
    latest: dict[tuple[str, str], Ranges] = {}
    hits = total = 0
    for request in requests:
        who = (request.session, request.agent)
        known = common_blocks(request.ranges, latest.get(who, ()))
        fresh = _ids_from(request.ranges, known)
        run = 0
        while run < len(fresh) and fresh[run] in seen:
            run += 1
        seen.update(fresh)
        latest[who] = request.ranges
        hits += known + run
        total += request.blocks
    return hits, total


def _ids_from(ranges: Ranges, skip: int) -> list[int]:
    ids: list[int] = []
    for first, count in ranges:
        if skip >= count:
            skip -= count
            continue
        ids.extend(range(first + skip, first + count))
        skip = 0
    return ids


class IdealCache:
    """An unlimited prefix cache with blocks of `block_tokens` tokens, over real token ids.

    Like an engine it never hits a prompt's last token: that one has to be computed to get an answer.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._known: set[bytes] = set()

    def hit_tokens(self, prompt: Sequence[int]) -> int:
        """Prompt tokens that the cache holds, in whole blocks."""
        keys = self._keys(prompt)
        blocks = 0
        while blocks < len(keys) and keys[blocks] in self._known:
            blocks += 1
        return min(blocks, max(0, len(prompt) - 1) // self.block_tokens) * self.block_tokens

    def add(self, prompt: Sequence[int]) -> None:
        self._known.update(self._keys(prompt))

    def _keys(self, prompt: Sequence[int]) -> list[bytes]:
        chain = PrefixChain(_ROOT, _ROOT, self.block_tokens)
        chain.extend(prompt)
        return chain.keys


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics; `share` from 0 to 1; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
