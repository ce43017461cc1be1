"""Where to load the blocks from that are not in the node's arena: the `local` and `prefill-read` policies.

Blocks behind a hole are worthless, so a source is worth what it holds *without a gap* from the current position on.
`recompute` is the empty plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

OWN_SSD = ""


class Source(msgspec.Struct, frozen=True):
    """`node`: a peer's id, or OWN_SSD. `runs`: sorted, disjoint (first, count) of the wanted blocks that it holds.
    `cost`: relative cost of a block from here; breaks ties between equally long runs."""

    node: str
    runs: Sequence[tuple[int, int]]
    cost: float = 0.0


class SourceRun(msgspec.Struct, frozen=True):
    """Blocks `first` … `first + count - 1` come from `node`."""

    node: str
    first: int
    count: int


def longest_runs(wanted: int, sources: Sequence[Source]) -> list[SourceRun]:
    """Cover as long a prefix of `wanted` blocks as the sources can, with few runs: at each position the source whose
    run goes on the longest, the cheaper one among equals."""
    plan: list[SourceRun] = []
    at = 0
    while at < wanted:
        best = max(
            ((_reach(source, at, wanted), -source.cost, source.node) for source in sources),
            default=(at, 0.0, ""),
        )
        if best[0] <= at:
            break
        plan.append(SourceRun(best[2], at, best[0] - at))
        at = best[0]
    return plan


def _reach(source: Source, at: int, wanted: int) -> int:
    for first, count in source.runs:
        if first <= at < first + count:
            return min(first + count, wanted)
    return at
