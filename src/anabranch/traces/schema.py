"""One request of a recorded workload.

**Covers** the form in which every reader hands requests on. **Does not cover** files (`live.files`) or texts: a trace
has none, see `synth`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from blake3 import blake3

Ranges = tuple[tuple[int, int], ...]
LOCAL_BITS = 32
LOCAL_MASK = (1 << LOCAL_BITS) - 1


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`t_s`: seconds since the trace (or its session) began. `think_s`: pause before it, after the agent's last answer.

    `ranges`: the prompt's blocks in order, as (first id, count); ids are below 2**63 and namespaced: equal ids mean
    equal prefixes up to and including that block, in the whole trace. `block_tokens` 0: the trace says nothing about
    contents. The blocks may cover a little less than the input (a tail that is no full block) or a little more (a last
    block in part).
    """

    t_s: float
    session: str
    input_tokens: int
    output_tokens: int
    agent: str = "main"
    think_s: float = 0.0
    block_tokens: int = 0
    ranges: Ranges = ()

    @property
    def blocks(self) -> int:
        return sum(count for _, count in self.ranges)

    def block_ids(self) -> list[int]:
        return [block for first, count in self.ranges for block in range(first, first + count)]


def ranges_of(ids: Iterable[int]) -> Ranges:
    """Runs of consecutive ids. `TraceRequest.block_ids` is its inverse."""
    runs: list[tuple[int, int]] = []
    for block in ids:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)


def common_blocks(one: Ranges, other: Ranges) -> int:
    """Length of the common prefix of two block lists, without writing them out."""
    common = at_one = at_other = used_one = used_other = 0
    while at_one < len(one) and at_other < len(other):
        first_one, count_one = one[at_one]
        first_other, count_other = other[at_other]
        if first_one + used_one != first_other + used_other:
            break
        run = min(count_one - used_one, count_other - used_other)
        common, used_one, used_other = common + run, used_one + run, used_other + run
        if used_one == count_one:
            at_one, used_one = at_one + 1, 0
        if used_other == count_other:
            at_other, used_other = at_other + 1, 0
    return common


class Namespaces:
    """Gives each session its own range of 2**32 ids. A namespace is a function of the session's name (so that an
    excerpt has the ids of the whole trace), unless two names collide: then the later one gets the next free."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def base(self, session: str) -> int:
        number = int.from_bytes(blake3(session.encode()).digest(4), "little") >> 1
        while self._names.setdefault(number, session) != session:
            number = (number + 1) % (1 << 31)
        return number << LOCAL_BITS


def by_session(requests: Sequence[TraceRequest]) -> dict[str, list[TraceRequest]]:
    """Requests grouped by session, in the order given."""
    sessions: dict[str, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return sessions
