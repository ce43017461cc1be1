"""What use so far says about use to come, learned online.

**Covers** histograms of reuse ages per class of block, and the worth of keeping a block that they imply.
**Does not cover** which class a block is in, and what it costs to compute (`cost`).

The worth of a block of class c at age a is its Gittins index: the best rate, over all horizons T, of

    P(reused within T more insertions) / E(insertions it occupies its slot until reuse or T)

It handles what recency cannot: blocks that are used once, and blocks that return after a pause. Hits per space and
time as a measure: Beckmann, Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018),
section 3; the index over horizons: Gittins, "Bandit processes and dynamic allocation indices" (1979).
"""

from __future__ import annotations

BUCKETS = 56  # half octaves of age: up to 2**28 insertions
FADE = 0.5
PRIOR_HITS = 0.02  # of each bucket of each class: without evidence, worth falls with age, as in LRU
PRIOR_USES = 1.0


def age_bucket(age: int) -> int:
    return min(BUCKETS - 1, (age * age).bit_length())


_WIDTHS = [0.5, *(2 ** (bucket / 2) - 2 ** ((bucket - 1) / 2) for bucket in range(1, BUCKETS))]


class ReuseStatistics:
    """`classes`: how many there are. Memory and time of `refresh`: O(classes × BUCKETS)."""

    def __init__(self, classes: int) -> None:
        self._uses = [0.0] * classes
        self._hits = [[0.0] * BUCKETS for _ in range(classes)]
        self.worth = [_worth(0.0, hits) for hits in self._hits]
        """class → age bucket → worth, as of the last `refresh`."""

    def used(self, kind: int) -> None:
        """A block of this class begins a new age."""
        self._uses[kind] += 1

    def reused(self, kind: int, age: int) -> None:
        self._hits[kind][age_bucket(age)] += 1

    def refresh(self) -> None:
        self.worth = [_worth(uses, hits) for uses, hits in zip(self._uses, self._hits, strict=True)]

    def fade(self) -> None:
        """Halve the weight of everything seen so far."""
        self._uses = [uses * FADE for uses in self._uses]
        self._hits = [[count * FADE for count in hits] for hits in self._hits]


def _worth(uses: float, hits: list[float]) -> list[float]:
    """Suffixes of (space-time, hits) from the oldest bucket on; their upper concave hull's first slope is the best rate
    over all horizons. One pass: each bucket is merged at most once."""
    surviving: list[float] = []
    left = uses + PRIOR_USES
    for count in hits:
        surviving.append(max(left, 0.0))
        left -= count
    worth = [0.0] * BUCKETS
    hull: list[tuple[float, float]] = []
    for bucket in range(BUCKETS - 1, -1, -1):
        gain = hits[bucket] + PRIOR_HITS
        space = max(surviving[bucket] - hits[bucket] / 2, 0.05) * _WIDTHS[bucket]
        while hull and hull[-1][0] * space >= gain * hull[-1][1]:
            more_gain, more_space = hull.pop()
            gain += more_gain
            space += more_space
        hull.append((gain, space))
        worth[bucket] = gain / space
    return worth
