"""Which nodes get a copy of a value.

**Covers** where a new value goes (`choose`) and where a lost replica is made again (`heir`). Both are functions of the
value's name and of what the nodes reported, so that everybody who decides gets the same answer. **Does not cover** what
leaves a full node (`policy.eviction`) or which replica is read.

A node that just came, and is empty, must not get everything: `choose` takes the less full of two nodes drawn by hash
(Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 2001), so an empty node among n gets
at most 2/n; `heir` draws in proportion to free bytes (weighted rendezvous hashing: Schindelhauer & Schomaker, SPAA
2005), with the same bound on a node's share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import xxhash

FULL_SHARE = 1 / 64
"""A full node still counts as this part of its size: eviction makes room there."""
_ROUNDS = 40


class Candidate(msgspec.Struct, frozen=True):
    """A node that takes values."""

    node_id: str
    free_bytes: int
    total_bytes: int

    @property
    def free_ratio(self) -> float:
        return self.free_bytes / self.total_bytes if self.total_bytes > 0 else 0.0


def choose(nodes: Sequence[Candidate], count: int, near: str, name: bytes) -> list[Candidate]:
    """`count` different nodes (fewer if there are no more) for the value `name`, the best first: node `near` if it is
    among them, then each time the less full of two drawn by hash. Deterministic; the order of `nodes` is irrelevant."""
    left = sorted(nodes, key=lambda node: node.node_id)
    chosen = [node for node in left if node.node_id == near][:count]
    left = [node for node in left if node.node_id != near]
    while left and len(chosen) < count:
        drawn = sorted(left, key=lambda node: _draw(name, node.node_id))[:2]
        best = max(drawn, key=lambda node: node.free_ratio)
        chosen.append(best)
        left.remove(best)
    return chosen


def shares(nodes: Sequence[Candidate]) -> list[float]:
    """What part of a repair each node should take: in proportion to its free bytes, at most 2/n of the whole."""
    weights = [max(float(node.free_bytes), node.total_bytes * FULL_SHARE, 1.0) for node in nodes]
    for _ in range(_ROUNDS):
        ceiling = max(2.0 * sum(weights) / len(nodes), 1e-300) if nodes else 0.0
        if max(weights, default=0.0) <= ceiling:
            break
        weights = [min(weight, ceiling) for weight in weights]
    whole = sum(weights)
    return [weight / whole for weight in weights]


def heir(
    nodes: Sequence[Candidate], weights: Sequence[float], name: bytes, holders: frozenset[str]
) -> Candidate | None:
    """Which node, not among `holders`, gets the copy of `name` that was lost; None if there is none. `weights`: of
    `shares(nodes)`. Over many names each node gets its share."""
    best, longest = None, -1.0
    for node, weight in zip(nodes, weights, strict=True):
        if node.node_id in holders or weight <= 0.0:
            continue
        uniform = (_draw(name, node.node_id) + 1) / (1 << 64)
        score = weight / -math.log(uniform) if uniform < 1.0 else math.inf
        if score > longest or (score == longest and best is not None and node.node_id < best.node_id):
            best, longest = node, score
    return best


def _draw(name: bytes, node_id: str) -> int:
    return int(xxhash.xxh3_64_intdigest(node_id.encode(), seed=int.from_bytes(name[:8], "little")))
