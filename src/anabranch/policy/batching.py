"""How much of each sequence one engine step computes: the compute quota.

A token at position p costs 1 + p / cost_context token equivalents (linear layers plus attention over p tokens), so a
step bounded by a quota takes about the same time at any context length. Decode tokens go first, then prefill in the
order given, the last one cut to what is left (DualPath, arXiv 2602.21548, section 2.5: compute-quota batching;
decode and prefill in one batch: Sarathi-Serve, arXiv 2403.02310).

**Covers** the arithmetic. **Does not cover** which sequences may run or whether they have pages (`engine.scheduler`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def chunk_cost(start: int, count: int, cost_context: float) -> float:
    """Cost in token equivalents of computing positions start … start + count - 1."""
    return count + (count * start + count * (count - 1) / 2) / cost_context


def affordable(start: int, quota: float, cost_context: float) -> int:
    """The largest count with chunk_cost(start, count) ≤ quota; 0 when not even one token fits."""
    if quota <= 0:
        return 0
    # chunk_cost = a·count² + b·count with a = 1/2c and b = 1 + (start - 1/2)/c: take the positive root, then settle
    # the rounding.
    a = 0.5 / cost_context
    b = 1.0 + (start - 0.5) / cost_context
    count = int((math.sqrt(b * b + 4.0 * a * quota) - b) / (2.0 * a))
    while chunk_cost(start, count + 1, cost_context) <= quota:
        count += 1
    while count > 0 and chunk_cost(start, count, cost_context) > quota:
        count -= 1
    return count


def share_quota(
    decodes: Iterable[int],
    prefills: Sequence[tuple[int, int]],
    *,
    quota: float,
    cost_context: float,
    block_tokens: int,
) -> list[int]:
    """How many tokens each prefill computes in this step (0 = none); every decode always computes its one.

    `decodes`: the position of each decode token. `prefills`: (start, tokens left), oldest first. A chunk that does not
    reach the end of its prompt is the step's last, and stops at a block boundary where it can, so that blocks become
    complete early. The first prefill always gets at least one block's worth, or a full batch of decodes would starve
    it.
    """
    left = quota - sum(1.0 + position / cost_context for position in decodes)
    counts: list[int] = []
    for index, (start, remaining) in enumerate(prefills):
        count = min(remaining, affordable(start, left, cost_context))
        if index == 0:
            count = max(count, min(remaining, block_tokens))
        if count < remaining:
            past = (start + count) % block_tokens
            if past < count:
                count -= past
        counts.append(count)
        left -= chunk_cost(start, count, cost_context)
        if count < remaining:
            break
    counts.extend([0] * (len(prefills) - len(counts)))
    return counts
