"""What use so far says about use to come, learned online.

**Covers** kinds of blocks, how often each kind comes back at which age, and the worth of keeping a block that this
implies. **Does not cover** how a block's history is kept (`cost`) and whether to trust the result (`duel`).

The worth of a block of kind c at age a is its Gittins index: the best rate, over all horizons T, of

    P(asked for within T more) / E(blocks asked for while it occupies its slot, until its use or T)

It handles what recency cannot: blocks that are used once, and blocks that return after a pause. Hits per space and
time as a measure: Beckmann, Chen, Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018),
section 3; the index over horizons: Gittins, "Bandit processes and dynamic allocation indices" (1979).

There are many kinds and little evidence on each, so hazards are not estimated kind by kind: a kind's hazard is that of
all blocks at this age times one factor for each of its traits, as in a proportional hazards model; the factors are
fitted to the counts by iterative proportional scaling (Deming, Stephan 1940), separately for bands of age. What was not
asked for yet counts as evidence up to its present age, and no further (as in Kaplan, Meier 1958).
"""

from __future__ import annotations

from collections.abc import Iterable

BUCKETS = 56  # half octaves of age: up to 2**28 blocks
AGES = 128  # rows of worth go on, so that `(age * age).bit_length()` is always a place in them
PACES = 15  # no pace yet, or by octaves from 1/16 of the pool on
GROWTHS = 11  # by octaves of blocks, up to 2**8; then LAST
LAST = GROWTHS - 1  # the end of a prompt, often a partial block that no other prompt has
USES = 5  # told apart up to 4
KINDS = PACES * GROWTHS * USES
TRAITS = (PACES, GROWTHS, USES)
BAND = 7  # buckets that share a factor
BANDS = BUCKETS // BAND
ROUNDS = 3
DOUBT = 20.0  # hits that pull each factor towards 1
PRIOR_HITS = 0.02  # of each bucket: without evidence, worth falls with age, as in LRU
MOST_HAZARD = 0.98
FADE = 0.5


def kind_of(pace: int, growth: int, uses: int) -> int:
    return (pace * GROWTHS + growth) * USES + uses


def traits_of(kind: int) -> tuple[int, int, int]:
    rest, uses = divmod(kind, USES)
    pace, growth = divmod(rest, GROWTHS)
    return pace, growth, uses


def age_bucket(age: int) -> int:
    """`age` < 2**63."""
    return min(BUCKETS - 1, (age * age).bit_length())


_WIDTHS = [0.5, *(2 ** (bucket / 2) - 2 ** ((bucket - 1) / 2) for bucket in range(1, BUCKETS))]


class ReuseStatistics:
    """Memory and time of `refresh`: O(kinds that were seen × BUCKETS), at most KINDS × BUCKETS, plus O(waiting)."""

    def __init__(self) -> None:
        self._hits: dict[int, list[float]] = {}
        self._lost: dict[int, list[float]] = {}
        unknown = _worth([PRIOR_HITS / (1 + PRIOR_HITS)] * BUCKETS)
        self.worth = [unknown] * KINDS
        """Kind → age bucket, of AGES → worth, as of the last `refresh`."""

    def returned(self, kind: int, age: int) -> None:
        """A block of this kind was asked for at this age."""
        self._row(self._hits, kind)[age_bucket(age)] += 1

    def forgotten(self, kind: int, age: int) -> None:
        """A block of this kind was not asked for up to this age; what became of it is not known."""
        self._row(self._lost, kind)[age_bucket(age)] += 1

    def refresh(self, waiting: Iterable[tuple[int, int]]) -> None:
        """`waiting`: (kind, age) of the blocks whose next use is still to come."""
        counts = self._exposures(waiting)
        base = _base(counts)
        factors = _fit(counts, base)
        self.worth = [_worth([min(MOST_HAZARD, hazard) for hazard in base])] * KINDS
        for kind in counts:
            rows = [factor[trait] for factor, trait in zip(factors, traits_of(kind), strict=True)]
            bands = [one * two * three for one, two, three in zip(*rows, strict=True)]
            self.worth[kind] = _worth([min(MOST_HAZARD, h * bands[b // BAND]) for b, h in enumerate(base)])

    def fade(self) -> None:
        """Halve the weight of everything seen so far."""
        for rows in (self._hits, self._lost):
            for kind, row in rows.items():
                rows[kind] = [count * FADE for count in row]

    def _row(self, rows: dict[int, list[float]], kind: int) -> list[float]:
        row = rows.get(kind)
        if row is None:
            row = rows[kind] = [0.0] * BUCKETS
        return row

    def _exposures(self, waiting: Iterable[tuple[int, int]]) -> _Counts:
        """For each kind and bucket: hits, and how many blocks lived through the bucket (half of one in which it
        was lost)."""
        left = {kind: list(row) for kind, row in self._lost.items()}
        last = BUCKETS - 1
        for kind, age in waiting:
            bucket = (age * age).bit_length()
            row = left.get(kind) or self._row(left, kind)
            row[bucket if bucket < last else last] += 1
        none = [0.0] * BUCKETS
        counts: _Counts = {}
        for kind in sorted(left.keys() | self._hits.keys()):
            hits, lost = self._hits.get(kind, none), left.get(kind, none)
            alive, exposed = 0.0, [0.0] * BUCKETS
            for bucket in range(last, -1, -1):
                alive += hits[bucket] + lost[bucket]
                exposed[bucket] = alive - lost[bucket] / 2
            counts[kind] = hits, exposed
        return counts


_Counts = dict[int, tuple[list[float], list[float]]]
_Factors = list[list[list[float]]]


def _base(counts: _Counts) -> list[float]:
    """Hazard of each bucket over all kinds."""
    hits, exposed = [PRIOR_HITS] * BUCKETS, [1.0 + PRIOR_HITS] * BUCKETS
    for row, alive in counts.values():
        hits = [a + b for a, b in zip(hits, row, strict=True)]
        exposed = [a + b for a, b in zip(exposed, alive, strict=True)]
    return [a / b for a, b in zip(hits, exposed, strict=True)]


def _fit(counts: _Counts, base: list[float]) -> _Factors:
    """Trait → its value → band → factor."""
    cells = []
    for kind, (hits, exposed) in counts.items():
        expected = [a * b for a, b in zip(exposed, base, strict=True)]
        for band in range(BANDS):
            span = slice(band * BAND, (band + 1) * BAND)
            cells.append((band, traits_of(kind), sum(hits[span]), sum(expected[span])))
    factors = [[[1.0] * BANDS for _ in range(values)] for values in TRAITS]
    for _ in range(ROUNDS):
        for trait, values in enumerate(TRAITS):
            seen = [[DOUBT] * BANDS for _ in range(values)]
            expected_of = [[DOUBT] * BANDS for _ in range(values)]
            for band, (one, two, three), found, due in cells:
                value = (one, two, three)[trait]
                seen[value][band] += found
                expected_of[value][band] += (
                    due * factors[0][one][band] * factors[1][two][band] * factors[2][three][band]
                )
            for value, row in enumerate(factors[trait]):
                for band in range(BANDS):
                    row[band] *= seen[value][band] / expected_of[value][band]
    return factors


def _worth(hazards: list[float]) -> list[float]:
    """Suffixes of (space-time, hits) from the oldest bucket on; their upper concave hull's first slope is the best rate
    over all horizons. One pass: each bucket is merged at most once."""
    alive, gains, spaces = 1.0, [], []
    for hazard, width in zip(hazards, _WIDTHS, strict=True):
        gains.append(alive * hazard)
        spaces.append(max(alive * (1 - hazard / 2), 1e-12) * width)
        alive *= 1 - hazard
    worth = [0.0] * AGES
    hull: list[tuple[float, float]] = []
    for bucket in range(BUCKETS - 1, -1, -1):
        gain, space = gains[bucket], spaces[bucket]
        while hull and hull[-1][0] * space >= gain * hull[-1][1]:
            more_gain, more_space = hull.pop()
            gain += more_gain
            space += more_space
        hull.append((gain, space))
        worth[bucket] = gain / space
    worth[BUCKETS:] = [worth[BUCKETS - 1]] * (AGES - BUCKETS)
    return worth
