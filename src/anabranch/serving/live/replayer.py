"""Sends the prompts of a ReplayPlan to an endpoint, some sessions at a time, and reports each turn as it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from anabranch.core.errors import AnabranchError, Overloaded, Unavailable
from anabranch.serving.live.endpoint import Endpoint
from anabranch.serving.replay import ReplayPlan, TurnResult, turn_result
from anabranch.serving.served import Served
from anabranch.traces.stats import IdealCache
from anabranch.traces.synth import ScaledTurn

OVERLOAD_TRIES = 20


class Replayer:
    """One run. `on_turn` is called from the event loop with every result, failures included, in the order in which
    turns end. After a turn that found the server gone no other is sent: `gone` then says why."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        plan: ReplayPlan,
        on_turn: Callable[[TurnResult], None],
        *,
        block_tokens: int,
        think_factor: float = 0.0,
    ) -> None:
        self._endpoint = endpoint
        self._model = model
        self._plan = plan
        self._on_turn = on_turn
        self._think_factor = think_factor
        self._ideal = IdealCache(block_tokens)
        self._start_s = time.monotonic()
        self.gone = ""

    async def run(self, concurrency: int) -> None:
        """Replay everything, `concurrency` sessions at a time; the turns of a session in order."""
        waiting = list(reversed(self._plan.sessions))

        async def worker() -> None:
            while waiting and not self.gone:
                await self._session(waiting.pop())

        async with asyncio.TaskGroup() as group:
            for _ in range(max(1, min(concurrency, len(waiting)))):
                group.create_task(worker())

    async def _session(self, turns: list[ScaledTurn]) -> None:
        for index, turn in enumerate(turns):
            if index and self._think_factor:
                await asyncio.sleep(turn.think_s * self._think_factor)
            if self.gone:
                return
            await self._turn(index, turn)

    async def _turn(self, index: int, turn: ScaledTurn) -> None:
        prompt = self._plan.prompt(turn)
        ideal = self._ideal.hit_tokens(prompt)
        started_s = time.monotonic() - self._start_s
        try:
            served = await self._ask(prompt, turn.output_tokens)
        except AnabranchError as error:
            if isinstance(error, Unavailable):
                self.gone = str(error)
            result = TurnResult(
                session=turn.session,
                agent=turn.agent,
                turn=index,
                prompt_tokens=len(prompt),
                ideal_tokens=ideal,
                started_s=started_s,
                error=f"{error.code}: {error}",
            )
        else:
            self._ideal.add(prompt)
            result = turn_result(turn, index, ideal, started_s, served)
        self._on_turn(result)

    async def _ask(self, prompt: list[int], max_tokens: int) -> Served:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(OVERLOAD_TRIES - 1):
            try:
                return await self._endpoint.stream("/v1/completions", body)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)
        return await self._endpoint.stream("/v1/completions", body)
