"""Which rail takes the next slice. A rail is a way to a peer: a NIC here and an address there.

`Spread` keeps for each rail what a byte costs there (seconds, an exponential average), how many bytes are under way,
and whether it failed. The average is one of *costs*, not of bandwidths: one bad sample weighs as much as it hurts, and
a rail that became ten times slower sheds most of its load within a few slices. A slice that is overdue counts at once.

A failed rail is left. After a pause that grows from FIRST_PAUSE_S to LONGEST_PAUSE_S it gets one slice as a probe;
when that is done, the rail is in use again.

Estimated finish time as the measure follows Mooncake's TENT (slice spraying); the rules above are this project's.
**Does not cover** connections and threads (`transfer.live.rails`) or the order among slices (`transfer.classes`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
STALE_S = 10.0
"""A slow rail that was not used for so long is tried again as if it were as fast as the fastest."""
WEIGHT = 0.3
"""Of a new sample of REFERENCE_BYTES in the average; smaller slices, mostly latency, weigh less."""
REFERENCE_BYTES = 512 << 10
UNKNOWN_COST = 1e-9
R = TypeVar("R", bound=Hashable)
S = TypeVar("S", bound=Hashable)


class _Rail:
    def __init__(self, bandwidth: float) -> None:
        self.cost = 1 / bandwidth if bandwidth > 0 else 0.0  # seconds a byte; 0: unknown
        self.backlog = 0
        self.since = 0.0  # when the oldest byte under way began to be the rail's only work
        self.used_at = 0.0
        self.pause_s = 0.0
        self.retry_at: float | None = None  # None: in use
        self.up_since = 0.0
        self.probing = False

    def due(self, now: float) -> bool:
        return self.retry_at is not None and not self.probing and now >= self.retry_at

    def give(self, count: int, now: float) -> None:
        if not self.backlog:
            self.since = now
        self.backlog += count
        self.used_at = now
        self.probing = self.retry_at is not None


class Spread(Generic[R]):
    """`rails`: rail → first guess of its bandwidth in bytes a second, 0 = unknown (then it counts as the fastest, so
    that it is measured soon). Not thread-safe. Raises KeyError for a rail that is not one of them."""

    def __init__(self, rails: Mapping[R, float]) -> None:
        self._rails = {rail: _Rail(bandwidth) for rail, bandwidth in rails.items()}

    def choose(self, count: int, now: float) -> R | None:
        """The rail on which `count` bytes would be done first, with what it has to do already, or one that is due for a
        probe; the bytes are its from now on. None: all have failed, ask again at `retry_at()`."""
        chosen = next((rail for rail, state in self._rails.items() if state.due(now)), None)
        if chosen is None:
            chosen = min(self.in_use(), key=lambda rail: self.finish_s(rail, count, now), default=None)
        if chosen is not None:
            self._rails[chosen].give(count, now)
        return chosen

    def take(self, rail: R, count: int, now: float) -> bool:
        """The rail itself asks for `count` bytes. False: it has failed and is not due for a probe."""
        state = self._rails[rail]
        if state.retry_at is not None and not state.due(now):
            return False
        state.give(count, now)
        return True

    def done(self, rail: R, count: int, seconds: float, now: float) -> None:
        """`count` bytes arrived; the rail worked on them for `seconds` (waiting behind other slices not included)."""
        state = self._rails[rail]
        state.backlog = max(0, state.backlog - count)
        state.since = state.used_at = now
        if state.probing:
            self.back(rail, now)
        if state.retry_at is None and count > 0:
            sample = max(seconds, 1e-9) / count
            weight = 1 - (1 - WEIGHT) ** min(count / REFERENCE_BYTES, 4)
            state.cost = state.cost + weight * (sample - state.cost) if state.cost else sample

    def back(self, rail: R, now: float) -> None:
        """The rail works again, as was seen in some other way."""
        state = self._rails[rail]
        if state.retry_at is not None:
            state.probing, state.retry_at, state.up_since = False, None, now

    def give_back(self, rail: R, count: int) -> None:
        """These bytes will not be sent, for a reason that is not the rail's."""
        state = self._rails[rail]
        state.backlog = max(0, state.backlog - count)
        state.probing = False

    def failed(self, rail: R, now: float) -> None:
        """Nothing that was under way on the rail arrived; it is left. Several reports of one failure count once."""
        state = self._rails[rail]
        state.backlog = 0
        if state.retry_at is None and now - state.up_since >= 10 * state.pause_s:
            state.pause_s = FIRST_PAUSE_S
        elif state.retry_at is None or state.probing:
            state.pause_s = min(2 * state.pause_s, LONGEST_PAUSE_S)
        state.retry_at = now + state.pause_s
        state.probing = False

    def in_use(self) -> list[R]:
        return [rail for rail, state in self._rails.items() if state.retry_at is None]

    def due(self, now: float) -> list[R]:
        """Failed rails whose pause is over."""
        return [rail for rail, state in self._rails.items() if state.due(now)]

    def retry_at(self) -> float | None:
        """When the next failed rail is due for its probe; None: none waits for one."""
        return min((s.retry_at for s in self._rails.values() if s.retry_at is not None and not s.probing), default=None)

    def backlog(self, rail: R) -> int:
        return self._rails[rail].backlog

    def bandwidth(self, rail: R) -> float:
        """Bytes a second, as far as known; 0 = not measured yet."""
        cost = self._rails[rail].cost
        return 1 / cost if cost else 0.0

    def finish_s(self, rail: R, count: int, now: float) -> float:
        """How long from now until `count` more bytes would be done."""
        return self.busy_s(rail, now) + count * self.cost(rail, now)

    def busy_s(self, rail: R, now: float) -> float:
        """How long from now until what is under way would be done. What is overdue is not nearly done: it counts in
        full."""
        state, cost = self._rails[rail], self.cost(rail, now)
        whole, elapsed = state.backlog * cost, now - state.since
        return whole - elapsed if state.backlog and elapsed < whole * (1 - 1e-9) else whole

    def cost(self, rail: R, now: float) -> float:
        """Seconds a byte, as it looks now."""
        state = self._rails[rail]
        if state.backlog:
            return max(state.cost or self._least_cost(), (now - state.since) / state.backlog)
        return state.cost if state.cost and now - state.used_at < STALE_S else self._least_cost()

    def _least_cost(self) -> float:
        return min((s.cost for s in self._rails.values() if s.cost and s.retry_at is None), default=UNKNOWN_COST)


class RailQueue(Generic[R, S]):
    """Late binding: slices wait in one queue and an idle rail asks for the `next`. Every slice is given out once, and
    again only if the rail it was given to failed. Not thread-safe."""

    def __init__(self, spread: Spread[R], slices: Iterable[tuple[S, int]]) -> None:
        self._spread = spread
        self._waiting = deque(slices)
        self._waiting_bytes = sum(count for _, count in self._waiting)
        self._under_way: dict[R, dict[S, int]] = {}

    @property
    def finished(self) -> bool:
        return not self._waiting and not any(self._under_way.values())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def unfinished(self) -> list[S]:
        """Slices that wait or are under way."""
        return [item for item, _ in self._waiting] + [item for lost in self._under_way.values() for item in lost]

    def next(self, rail: R, now: float) -> S | None:
        """A slice for this rail. None: there is none for it now; unless `finished`, ask again after any `done` or
        `failed`, or at the spread's `retry_at()`. A rail gets none if the others would be done with all that is left
        before it was done with one slice; the fastest idle rail always gets one."""
        if not self._waiting:
            return None
        item, count = self._waiting[0]
        if self._better_left(rail, count, now) or not self._spread.take(rail, count, now):
            return None
        self._waiting.popleft()
        self._waiting_bytes -= count
        self._under_way.setdefault(rail, {})[item] = count
        return item

    def done(self, rail: R, item: S, seconds: float, now: float) -> bool:
        """False: the slice was not this rail's any more (it failed meanwhile), so another one has it or will."""
        count = self._under_way.get(rail, {}).pop(item, None)
        if count is None:
            return False
        self._spread.done(rail, count, seconds, now)
        return True

    def failed(self, rail: R, now: float) -> list[S]:
        """The rail is left; what was under way on it waits again, first in line. Returns those slices."""
        lost = self._under_way.pop(rail, {})
        self._spread.failed(rail, now)
        self._waiting.extendleft(reversed(lost.items()))
        self._waiting_bytes += sum(lost.values())
        return list(lost)

    def put_back(self, rail: R, item: S) -> None:
        """The slice has to be sent again, and the rail is not to blame."""
        count = self._under_way.get(rail, {}).pop(item, None)
        if count is not None:
            self._spread.give_back(rail, count)
            self._waiting.appendleft((item, count))
            self._waiting_bytes += count

    def _better_left(self, rail: R, count: int, now: float) -> bool:
        spread = self._spread
        if rail not in spread.in_use():  # a probe is not held back: it must happen some time
            return False
        others = [(spread.cost(o, now) * count, spread.busy_s(o, now)) for o in spread.in_use() if o != rail]
        return others_are_sooner(spread.finish_s(rail, count, now), self._waiting_bytes / count, others)


def others_are_sooner(own_s: float, waiting: float, others: Iterable[tuple[float, float]]) -> bool:
    """Whether `others`, each (seconds a slice, seconds until it has room), would be done with all `waiting` slices
    before one that takes `own_s` for its next. Never true for the fastest when all are idle: somebody always takes a
    slice."""
    before_s = own_s * (1 - 1e-9)
    return sum(max(0, int((before_s - busy_s) / slice_s)) for slice_s, busy_s in others if slice_s > 0) >= waiting
