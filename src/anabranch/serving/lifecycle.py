"""One request's way through the engines: route, prepare, prefill, start, decode; retry, resume, cancel.

**Covers** every decision about one `EngineRequest`, as `(event, now) → actions`. **Does not cover** text (the gateway
turns tokens into text) or sockets: the live gateway carries actions out and feeds events in.

    waiting ──▶ preparing ──▶ prefilling ──▶ running ──▶ ended        disaggregated
       ▲   └──────────────────────────────▶ running                  colocated (Submit)
       └── an engine was lost, refused, or let a deadline pass; at most `retries` times

An attempt that fails after tokens reached the client is continued, not lost: tokens are functions of (tokens, seed,
choice, position) alone. One choice without penalties *resumes*: prompt and generated tokens are submitted as a new
prompt. Anything else is *replayed*: run again from the start, and tokens that the client has are compared and dropped;
a difference ends the request with an error rather than with a spliced answer.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.blocks.hashing import PrefixChain
from anabranch.core.errors import AnabranchError, DeadlineExceeded, Overloaded, Unavailable
from anabranch.engine.messages import (
    Cancel,
    EngineToGateway,
    Failed,
    Prefill,
    Prefilled,
    Prepare,
    Prepared,
    Start,
    Submit,
    TokenEvent,
)
from anabranch.engine.request import EngineRequest, Usage
from anabranch.policy.routing import Prompt, Route
from anabranch.serving.actions import Action, Computed, Deliver, Ended, Routed, Send, Waits, refusal
from anabranch.serving.fleet import Claim, Fleet

Phase = Literal["waiting", "preparing", "prefilling", "running", "ended"]


class RequestLifecycle:
    """Feed it events; carry out what it returns, in order. After `Ended` every event returns nothing.

    `chain` names the prompt's blocks (for affinity; it is extended by the answer at the end); None: not cacheable.
    """

    def __init__(
        self,
        request: EngineRequest,
        chain: PrefixChain | None,
        fleet: Fleet,
        *,
        now: float,
        retries: int = 2,
        waits: Waits | None = None,
    ) -> None:
        self._request = request
        self._chain = chain
        self._fleet = fleet
        self._waits = waits or Waits()
        self._retries = retries
        self._end = now + request.deadline_s
        self._phase: Phase = "waiting"
        self._phase_end = min(self._end, now + self._waits.engine_s)
        self._pause_until = 0.0
        self._attempt = 0
        self._route: Route | None = None
        self._claims: list[Claim] = []
        self._avoid: set[str] = set()
        self._open = set(range(request.n))
        self._sent: list[list[int]] = [[] for _ in range(request.n)]
        self._skip = [0] * request.n
        self._counted = False
        # Of the current attempt: the decode engine was told to generate; the prompt is done; it has sent tokens.
        self._started = self._prompt_done = self._generating = False
        self._steps = 0
        self._error: AnabranchError = Unavailable("no engine is connected")

    # --- what the driver reads ----------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def attempt_id(self) -> str:
        """The request id that engines know now. Messages under any other are stale."""
        return f"{self._request.request_id}/{self._attempt}"

    @property
    def engines(self) -> tuple[str, ...]:
        """Engines that work on the current attempt: (prefill, decode), or one."""
        if self._route is None:
            return ()
        if self._route.prefill is None:
            return (self._route.decode,)
        return (self._route.prefill, self._route.decode)

    @property
    def deadline(self) -> float:
        """When `tick` must be called next."""
        waking = self._pause_until if self._phase == "waiting" and self._pause_until else self._end
        return min(self._end, self._phase_end, waking)

    # --- events -------------------------------------------------------------------------------------------------

    def start(self, now: float) -> list[Action]:
        """Also: an engine arrived."""
        if self._phase != "waiting" or now < self._pause_until:
            return []
        request = self._attempt_request()
        prompt = Prompt(
            tokens=len(request.tokens),
            keys=self._chain.keys if self._chain is not None else (),
            answer_tokens=request.n * request.sampling.max_tokens,
            one_token=request.sampling.max_tokens == 1,
        )
        route = self._fleet.choose(prompt, self._avoid)
        if route is None:
            return []
        self._attempt += 1
        self._route = route
        self._started = self._prompt_done = self._generating = False
        routed = Routed(route=route, attempt=self._attempt)
        request = self._addressed(request, now)
        if route.prefill is None:
            self._started = True
            self._claims = [self._fleet.claim(route.decode, route.price)]
            self._enter("running", now + self._waits.token_s)
            return [routed, Send(route.decode, Submit(request=request))]
        self._claims = [self._fleet.claim(route.prefill, route.price), self._fleet.claim(route.decode, 0.0)]
        self._enter("preparing", now + self._waits.prepare_s)
        return [routed, Send(route.decode, Prepare(request=request))]

    def message(self, engine_id: str, message: EngineToGateway, now: float) -> list[Action]:
        """Prepared, Prefilled or Failed; stale ones are dropped."""
        if self._route is None or self._phase == "ended" or engine_id not in self.engines:
            return []
        match message:
            case Prepared() if message.request_id == self.attempt_id and self._phase == "preparing":
                return self._prepared(self._route, message, now)
            case Prefilled() if message.request_id == self.attempt_id and self._phase == "prefilling":
                return self._prefilled(self._route, message, now)
            case Failed() if message.request_id == self.attempt_id:
                return self._failed(engine_id, message, now)
        return []

    def tokens(self, engine_id: str, events: list[TokenEvent], now: float) -> list[Action]:
        """Tokens of this request out of one StepOutput."""
        if self._phase != "running" or self._route is None or engine_id != self._route.decode:
            return []
        events = [event for event in events if event.request_id == self.attempt_id]
        self._generating = self._generating or bool(events)
        return self._deliver(events, now)

    def engine_lost(self, engine_id: str, now: float) -> list[Action]:
        """The connection is gone, and with it everything the engine did for this request."""
        if self._route is None or self._phase == "ended" or engine_id not in self.engines:
            return []
        if self._phase == "running" and engine_id != self._route.decode:
            # Prefill has sent everything; the decode engine says whether it arrived.
            return []
        return self._again(Unavailable(f"engine {engine_id} was lost"), now, but=engine_id)

    def tick(self, now: float) -> list[Action]:
        """Deadlines. Call at `deadline`; earlier calls change nothing."""
        if self._phase == "ended" or now < self.deadline:
            return []
        if now >= self._end:
            return self._finish(DeadlineExceeded(f"not finished within {self._request.deadline_s:g} s"))
        if self._phase == "waiting":
            return self._finish(self._error) if now >= self._phase_end else self._wake(now)
        culprit = self._awaited()
        wait_s, stalled = {
            "preparing": (self._waits.prepare_s, "prepare"),
            "prefilling": (self._waits.prefill_s, "prefill"),
            "running": (self._waits.token_s, "send a token"),
        }[self._phase]
        if self._steps_of(culprit) > self._steps:
            self._enter(self._phase, now + wait_s)
            return []
        self._avoid.add(culprit)
        return self._again(DeadlineExceeded(f"engine {culprit} did not {stalled} in time"), now)

    def close_choice(self, index: int) -> list[Action]:
        """The gateway ended this choice (a stop string): tokens that still come for it are dropped."""
        self._open.discard(index)
        return [] if self._phase == "ended" or self._open else self._finish(None)

    def cancel(self, error: AnabranchError | None = None) -> list[Action]:
        """The client went away, or (with an error) the gateway gives the request up."""
        return [] if self._phase == "ended" else self._finish(error, cancelled=True)

    # --- steps --------------------------------------------------------------------------------------------------

    def _prepared(self, route: Route, message: Prepared, now: float) -> list[Action]:
        prefill = route.prefill
        if prefill is None or prefill not in self._fleet.engines:
            return self._again(Unavailable(f"engine {prefill} was lost"), now)
        self._enter("prefilling", now + max(message.ticket.deadline_s, self._waits.prefill_s))
        request = self._addressed(self._attempt_request(), now)
        return [Send(prefill, Prefill(request=request, ticket=message.ticket))]

    def _prefilled(self, route: Route, message: Prefilled, now: float) -> list[Action]:
        attempt = self._attempt
        self._enter("running", now + self._waits.token_s)
        actions = [*self._count(message.usage), *self._deliver(message.first, now)]
        if self._phase == "running" and self._attempt == attempt:
            self._started = True
            first = [event.token for event in sorted(message.first, key=lambda event: event.index)]
            # Before the tokens go to the client: decoding should not wait for anything.
            actions.insert(0, Send(route.decode, Start(request_id=self.attempt_id, first=first)))
        return actions

    def _deliver(self, events: list[TokenEvent], now: float) -> list[Action]:
        if not events:
            return []
        self._phase_end = now + self._waits.token_s
        actions: list[Action] = []
        fresh: list[TokenEvent] = []
        failure: list[Action] | None = None
        for event in events:
            if event.usage is not None:
                actions += self._count(event.usage)
            if event.index not in self._open:
                continue
            if event.finish in ("cancelled", "failed"):
                failure = self._again(Unavailable("the engine gave the request up"), now)
                break
            if self._skip[event.index]:
                if not self._repeats(event):
                    failure = self._finish(Unavailable("the answer could not be continued exactly; send it again"))
                    break
                continue
            self._sent[event.index].append(event.token)
            fresh.append(event)
            if event.finish is not None:
                self._open.discard(event.index)
        if fresh:
            actions.append(Deliver(fresh))
        if failure is not None:
            return actions + failure
        self._settle_prompt()
        return actions if self._open else actions + self._finish(None, complete=True)

    def _repeats(self, event: TokenEvent) -> bool:
        sent = self._sent[event.index]
        expected = sent[len(sent) - self._skip[event.index]]
        self._skip[event.index] -= 1
        return event.token == expected and event.finish is None

    def _settle_prompt(self) -> None:
        if not self._prompt_done:
            self._prompt_done = True
            if self._route is not None and self._route.prefill is not None:
                self._fleet.release(self._claims[0])
            else:
                self._fleet.computed(self._claims[0])
            if self._chain is not None:
                self._fleet.record(self.engines, self._chain.keys)

    def _count(self, usage: Usage) -> list[Action]:
        counted, self._counted = self._counted, True
        return [] if counted else [Computed(_of_prompt(usage, len(self._request.tokens)))]

    def _failed(self, engine_id: str, message: Failed, now: float) -> list[Action]:
        if self._generating and self._route is not None and engine_id == self._route.prefill:
            return []  # the hand-off had arrived after all
        error = refusal(engine_id, message)
        self._avoid.add(engine_id)
        alternative = any(view.engine_id not in self._avoid for view in self._fleet.views())
        if not message.retryable or (isinstance(error, Overloaded) and not alternative):
            return self._finish(error, but=engine_id)
        pause_s = 0.0 if alternative or self._attempt == 1 else message.retry_after_s
        return self._again(error, now, but=engine_id, pause_s=pause_s)

    # --- ending and trying again --------------------------------------------------------------------------------

    def _again(
        self, error: AnabranchError, now: float, *, but: str | None = None, pause_s: float = 0.0
    ) -> list[Action]:
        if self._attempt > self._retries:
            return self._finish(error, but=but)
        actions = self._cancels(but)
        self._release()
        self._error = error
        self._route = None
        self._skip = [0 if self._resumes() else len(tokens) for tokens in self._sent]
        self._pause_until = now + pause_s if pause_s else 0.0
        self._enter("waiting", now + pause_s + self._waits.engine_s)
        return actions + self.start(now)

    def _wake(self, now: float) -> list[Action]:
        self._pause_until = 0.0
        return self.start(now)

    def _finish(
        self,
        error: AnabranchError | None,
        *,
        cancelled: bool = False,
        complete: bool = False,
        but: str | None = None,
    ) -> list[Action]:
        # Engines that said their last word need no Cancel; a decode engine that was prepared and not started does.
        actions = [] if complete and self._started else self._cancels(but)
        if error is None and self._chain is not None and self._route is not None and self._request.n == 1:
            self._chain.extend(self._sent[0])
            self._fleet.record((self._route.decode,), self._chain.keys)
        self._release()
        self._phase = "ended"
        return [*actions, Ended(error=error, cancelled=cancelled)]

    def _cancels(self, but: str | None) -> list[Action]:
        return [
            Send(engine_id, Cancel(request_id=self.attempt_id))
            for engine_id in self.engines
            if engine_id != but and engine_id in self._fleet.engines
        ]

    def _release(self) -> None:
        for claim in self._claims:
            self._fleet.release(claim)
        self._claims = []

    def _enter(self, phase: Phase, until: float) -> None:
        self._phase = phase
        self._phase_end = until
        self._steps = self._steps_of(self._awaited())

    def _awaited(self) -> str:
        """The engine whose word comes next."""
        if self._route is None:
            return ""
        return self._route.prefill or "" if self._phase == "prefilling" else self._route.decode

    def _steps_of(self, engine_id: str) -> int:
        state = self._fleet.engines.get(engine_id)
        return state.load.steps if state is not None and state.load is not None else 0

    def _resumes(self) -> bool:
        """Penalties tell prompt from answer, so a resumed prompt would change them."""
        sampling = self._request.sampling
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        return self._request.n == 1 and penalties == (1.0, 0.0, 0.0)

    def _attempt_request(self) -> EngineRequest:
        done = self._sent[0] if self._resumes() else []
        if not done:
            return self._request
        sampling = self._request.sampling
        sampling = msgspec.structs.replace(
            sampling,
            max_tokens=sampling.max_tokens - len(done),
            min_tokens=max(0, sampling.min_tokens - len(done)),
        )
        return msgspec.structs.replace(self._request, tokens=[*self._request.tokens, *done], sampling=sampling)

    def _addressed(self, request: EngineRequest, now: float) -> EngineRequest:
        left_s = max(0.001, self._end - now)
        return msgspec.structs.replace(request, request_id=self.attempt_id, deadline_s=left_s)


def _of_prompt(usage: Usage, prompt: int) -> Usage:
    """The part of a usage that is about the first `prompt` tokens: a resumed attempt's prompt ends with tokens of the
    answer. Cached blocks come first (arena, then loaded ones), so what is cut off is computed, then loaded."""
    extra = usage.prompt - prompt
    left: dict[str, int] = {}
    for origin in ("computed", "peer", "ssd", "dram"):
        count: int = getattr(usage, origin)
        left[origin] = count - min(count, extra)
        extra -= min(count, extra)
    return Usage(prompt=prompt, **left)
