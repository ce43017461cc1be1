"""Replaying recorded sessions against an endpoint: which prompts to send, and what the measurements say.

**Covers** the plan and the summary, as functions of their inputs. **Does not cover** sending (`live.replayer`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from anabranch.core.errors import InvalidInput
from anabranch.serving.served import TIERS, Served
from anabranch.traces.schema import TraceRequest, by_session
from anabranch.traces.stats import percentile
from anabranch.traces.synth import ScaledTurn, scale_session


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions in order; the turns of one are sent one after the other. `first_token`, `last_token` (exclusive) and
    `seed` choose the token ids: the same three give the same prompts again."""

    sessions: list[list[ScaledTurn]]
    first_token: int
    last_token: int
    seed: int

    def prompt(self, turn: ScaledTurn) -> list[int]:
        return turn.prompt(range(self.first_token, self.last_token), seed=self.seed)

    @property
    def turns(self) -> int:
        return sum(len(session) for session in self.sessions)


def plan_replay(
    requests: Sequence[TraceRequest],
    *,
    sessions: int,
    turns: int,
    context: int,
    max_output: int,
    vocabulary: range,
    seed: int,
) -> ReplayPlan:
    """The first `sessions` sessions and the first `turns` turns of each, scaled to `context`. Raises InvalidInput for a
    trace that has nothing to reuse or a context without room."""
    if not any(request.ranges for request in requests):
        raise InvalidInput("this trace has lengths but no block ids: there is no prefix to reuse; choose another trace")
    if not vocabulary:
        raise InvalidInput("the token range is empty; write it FIRST:LAST with FIRST < LAST")
    groups = [group for group in by_session(requests).values() if group[0].ranges]
    chosen = [scale_session(group[:turns], context=context, max_output=max_output) for group in groups[:sessions]]
    return ReplayPlan(sessions=chosen, first_token=vocabulary.start, last_token=vocabulary.stop, seed=seed)


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as measured. `error`: "" or why there is no answer (then all figures are 0). `ideal_tokens`: what an
    unlimited cache would have held of this prompt when it was sent."""

    session: str
    agent: str
    turn: int
    prompt_tokens: int
    ideal_tokens: int
    cached_tokens: int = 0
    tiers: dict[str, int] = {}
    output_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float | None = None
    total_s: float = 0.0
    started_s: float = 0.0
    error: str = ""

    def missed_blocks(self, block_tokens: int) -> float:
        """Blocks that were computed although they could have been reused; negative if more was reused than this run
        itself had sent before (the cache was warm)."""
        return (self.ideal_tokens - self.cached_tokens) / block_tokens


def turn_result(turn: ScaledTurn, index: int, ideal_tokens: int, started_s: float, served: Served) -> TurnResult:
    return TurnResult(
        session=turn.session,
        agent=turn.agent,
        turn=index,
        prompt_tokens=turn.input_tokens,
        ideal_tokens=ideal_tokens,
        cached_tokens=served.cached_tokens,
        tiers=served.tiers,
        output_tokens=served.output_tokens,
        ttft_s=served.ttft_s,
        tpot_s=served.tpot_s,
        total_s=served.total_s,
        started_s=started_s,
    )


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """None where nothing was measured."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


def spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(count=0, mean=None, p50=None, p90=None, p99=None)
    return Spread(
        count=len(values),
        mean=sum(values) / len(values),
        p50=percentile(values, 0.5),
        p90=percentile(values, 0.9),
        p99=percentile(values, 0.99),
    )


class ReplaySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are of all prompt tokens that got an answer. `missed_blocks`: per turn, see TurnResult. `short_turns`:
    turns that reused more than one block less than the ideal."""

    turns: int
    failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    cached_share: float
    ideal_share: float
    tiers: dict[str, int]
    ttft_s: Spread
    first_ttft_s: Spread
    later_ttft_s: Spread
    tpot_s: Spread
    total_s: Spread
    missed_blocks: Spread
    worst_missed_blocks: float
    short_turns: int
    errors: dict[str, int]


def summarize(results: Sequence[TurnResult], duration_s: float, block_tokens: int) -> ReplaySummary:
    good = [result for result in results if not result.error]
    prompt = sum(result.prompt_tokens for result in good)
    output = sum(result.output_tokens for result in good)
    missed = [result.missed_blocks(block_tokens) for result in good]
    errors: dict[str, int] = {}
    for result in results:
        if result.error:
            errors[result.error] = errors.get(result.error, 0) + 1

    def share(of: Callable[[TurnResult], int]) -> float:
        return sum(of(result) for result in good) / prompt if prompt else 0.0

    return ReplaySummary(
        turns=len(good),
        failed=len(results) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_s=output / duration_s if duration_s else 0.0,
        cached_share=share(lambda result: result.cached_tokens),
        ideal_share=share(lambda result: result.ideal_tokens),
        tiers={tier: sum(result.tiers.get(tier, 0) for result in good) for tier in TIERS},
        ttft_s=spread([result.ttft_s for result in good]),
        first_ttft_s=spread([result.ttft_s for result in good if result.turn == 0]),
        later_ttft_s=spread([result.ttft_s for result in good if result.turn > 0]),
        tpot_s=spread([result.tpot_s for result in good if result.tpot_s is not None]),
        total_s=spread([result.total_s for result in good]),
        missed_blocks=spread(missed),
        worst_missed_blocks=max(missed, default=0.0),
        short_turns=sum(1 for blocks in missed if blocks > 1),
        errors=errors,
    )
