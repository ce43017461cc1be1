"""One HTTP request's answer: its prompts' tokens in, JSON or server-sent events out.

**Covers** assembling text, stop strings, disconnects, clients that do not read, and errors before and after the first
byte. **Does not cover** parsing (`serving.openai`) or engines (`live.dispatcher`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from anabranch.blocks.hashing import PrefixChain
from anabranch.core.errors import AnabranchError
from anabranch.engine.messages import TokenEvent
from anabranch.engine.request import EngineRequest, Usage
from anabranch.serving.answers import UsageBody, Voice, error_body, http_status, sse, usage_body
from anabranch.serving.assembly import ChoiceText, Entry, Piece, choice_texts
from anabranch.serving.detokenizer import Detokenizer
from anabranch.serving.live.dispatcher import Call, Dispatcher
from anabranch.serving.live.metrics import GatewayMetrics

# Beyond the request's own deadline: a client that stops reading is given up after this.
SLOW_CLIENT_S = 30.0
MAX_PENDING_EVENTS = 4096
"""Token events a stream keeps for a client that does not read, beyond what its socket holds; with more it is cut off.
Checked per engine step, so at most one step's events are kept on top."""
HANG_UP = "anabranch.hang_up"
"""Key in the ASGI scope's `state`: a function that drops the connection, with everything not sent yet."""
SLOW_READER = "slow_reader"


class Outcome:
    """How a request ended, for the metrics; filled in by whoever knows."""

    def __init__(self) -> None:
        self.label = ""


class Exchange:
    """An ASGI response, and the sink of its calls.

    Nothing is sent before the first token, so a request that fails without one gets an honest status code.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[EngineRequest, PrefixChain | None]],
        voice: Voice,
        stream: bool,
        stops: Sequence[str],
        detokenizer: Callable[[], Detokenizer],
        dispatcher: Dispatcher,
        metrics: GatewayMetrics,
        *,
        clock: Callable[[], float],
        arrived: float,
        timeout_s: float,
    ) -> None:
        self._prompts = prompts
        self._voice = voice
        self._stream = stream
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._arrived = arrived
        self._timeout_s = timeout_s
        self._texts: list[ChoiceText] = []
        for request, _ in prompts:
            stop_ids = request.sampling.stop_token_ids
            self._texts += choice_texts(request.n, detokenizer, stops, stop_ids, first_index=len(self._texts))
        self._calls: dict[Call, int] = {}
        self._pending: deque[tuple[Call, list[TokenEvent]]] = deque()
        self._pending_events = 0
        self._blocked = False
        self._hang_up: Callable[[], None] | None = None
        self._outcome = Outcome()
        self._wake = asyncio.Event()
        self._left = len(prompts)
        self._error: AnabranchError | None = None
        self._first = self._last = 0.0

    # --- the sink -----------------------------------------------------------------------------------------------

    def tokens(self, call: Call, events: list[TokenEvent]) -> None:
        self._last = self._clock()
        self._first = self._first or self._last
        if self._outcome.label == SLOW_READER:
            return
        self._pending.append((call, events))
        self._pending_events += len(events)
        self._wake.set()
        if self._blocked and self._pending_events > MAX_PENDING_EVENTS:
            self._cut_off()

    def ended(self, call: Call, error: AnabranchError | None) -> None:
        self._left -= 1
        if error is not None and self._error is None:
            self._error = error
            self._abandon()
        self._wake.set()

    # --- the response -------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome: Outcome = scope["anabranch.outcome"]
        outcome.label = "failed"
        self._outcome = outcome
        self._hang_up = scope["state"][HANG_UP]
        watcher = asyncio.create_task(self._watch(receive, outcome))
        try:
            self._submit()
            async with asyncio.timeout(self._timeout_s + SLOW_CLIENT_S):
                await self._moved()
                if self._error is not None and not self._pending:
                    raise self._error
                await (self._send_stream(send) if self._stream else self._send_whole(send))
            if self._error is None and self._first and outcome.label == "failed":
                outcome.label = "ok"
                self._metrics.finished(
                    self._first - self._arrived, self._last - self._arrived, (text.tokens for text in self._texts)
                )
        except AnabranchError:
            outcome.label = ""  # the status code tells
            raise
        finally:
            watcher.cancel()
            self._abandon()

    def _submit(self) -> None:
        """Raises Overloaded, with nothing submitted."""
        self._dispatcher.admission.admit(len(self._prompts))
        base = 0
        for request, chain in self._prompts:
            self._calls[self._dispatcher.submit(request, chain, self)] = base
            base += request.n

    async def _watch(self, receive: Receive, outcome: Outcome) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if outcome.label != SLOW_READER:
            outcome.label = "cancelled"
        self._abandon()

    def _cut_off(self) -> None:
        """Ends the connection too: the blocked send then returns, and the stream finds its calls ended."""
        self._outcome.label = SLOW_READER
        self._pending.clear()
        self._pending_events = 0
        if self._hang_up is not None:
            self._hang_up()
        self._abandon()

    def _abandon(self) -> None:
        for call in list(self._calls):
            self._dispatcher.cancel(call)

    async def _moved(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    async def _send_stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        data = [self._voice.opening(len(self._texts))]
        while True:
            data += [self._voice.event(piece) for piece in self._drain()]
            ended = self._left == 0 and not self._pending
            if ended:
                data.append(self._ending())
            if body := b"".join(data):
                self._blocked = True
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._blocked = False
            if ended:
                break
            data = []
            await self._moved()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _ending(self) -> bytes:
        """No end mark after an error: a client that skips the error must not take the answer for complete."""
        if self._error is not None:
            return sse(error_body(self._error, http_status(self._error)))
        return self._voice.closing(self._usage())

    async def _send_whole(self, send: Send) -> None:
        said: list[tuple[list[str], list[Entry]]] = [([], []) for _ in self._texts]
        while True:
            for piece in self._drain():
                said[piece.index][0].append(piece.text)
                said[piece.index][1].extend(piece.entries)
            if self._left == 0 and not self._pending:
                break
            await self._moved()
        if self._error is not None:
            raise self._error
        choices = [
            (text.index, "".join(texts), entries, text.finish)
            for text, (texts, entries) in zip(self._texts, said, strict=True)
        ]
        body = self._voice.whole(choices, self._usage())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _drain(self) -> list[Piece]:
        pieces: list[Piece] = []
        self._pending_events = 0
        while self._pending:
            call, events = self._pending.popleft()
            base = self._calls[call]
            for event in events:
                text = self._texts[base + event.index]
                over = text.finish is not None
                pieces.append(text.push(event))
                if text.finish is not None and not over and event.finish is None:
                    self._dispatcher.close_choice(call, event.index)
        return pieces

    def _usage(self) -> UsageBody:
        usages = [call.usage or Usage() for call in self._calls]
        prompt_tokens = sum(len(request.tokens) for request, _ in self._prompts)
        return usage_body(usages, prompt_tokens, sum(text.tokens for text in self._texts))
