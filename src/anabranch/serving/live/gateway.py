"""The OpenAI-compatible HTTP application.

**Covers** endpoints, authentication, readiness and draining. **Does not cover** answers on their way
(`live.exchange`), engines (`live.dispatcher`), routes and errors (`live.app`), sockets and signals (`live.server`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from anabranch.blocks.hashing import PrefixChain
from anabranch.core.authentication import is_loopback
from anabranch.core.errors import RequestError, Unavailable
from anabranch.engine.messages import EngineHello
from anabranch.engine.request import EngineRequest
from anabranch.engine.runner import ModelInfo
from anabranch.policy.admission import Admission
from anabranch.policy.routing import RoutingSettings
from anabranch.serving.actions import Waits
from anabranch.serving.answers import Voice
from anabranch.serving.config import GatewayConfig
from anabranch.serving.fleet import Fleet
from anabranch.serving.live.access import Tenants
from anabranch.serving.live.dispatcher import Dispatcher
from anabranch.serving.live.exchange import Exchange
from anabranch.serving.live.metrics import GatewayMetrics
from anabranch.serving.live.tokenizer import Tokenizer
from anabranch.serving.openai import Ask, Limits, SamplingDefaults, parse_chat, parse_completion, parse_tokenize, settle
from anabranch.serving.prompts import check_messages

T = TypeVar("T")
log = logging.getLogger(__name__)
BODY_S = 60.0
INLINE_BYTES = 16 << 10
"""Bodies up to this size are parsed and tokenized on the event loop; larger ones in a thread."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """`root` starts every block-key chain (`blocks.key.Identity.root`); `created` is a UNIX time for /v1/models."""

    name: str
    info: ModelInfo
    root: bytes
    tokenizer: Tokenizer
    created: int
    defaults: SamplingDefaults = SamplingDefaults()


class Senses(msgspec.Struct, frozen=True, kw_only=True):
    """What comes from outside: a monotonic clock, UNIX time, random bytes."""

    clock: Callable[[], float]
    unix_time: Callable[[], float]
    random_bytes: Callable[[int], bytes]


class Gateway:
    """The state behind the application. `draining`: nothing new is accepted and readiness is red."""

    def __init__(
        self,
        config: GatewayConfig,
        model: ServedModel,
        engines: Sequence[str],
        tenants: Tenants,
        senses: Senses,
        *,
        waits: Waits | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.tenants = tenants
        self.senses = senses
        self.draining = False
        self.metrics = GatewayMetrics(CollectorRegistry())
        info = model.info
        settings = RoutingSettings(block_tokens=info.layout.block_tokens, cost_context=info.cost_context)
        self.dispatcher = Dispatcher(
            engines,
            Fleet(settings),
            Admission(config.max_queue),
            self.metrics,
            accept=self._accept,
            clock=senses.clock,
            retries=config.retries,
            waits=waits or Waits(),
        )
        self._limits = Limits(
            model=model.name,
            context_tokens=info.context_tokens,
            vocab=info.vocab,
            eos_token_ids=info.eos_token_ids,
            max_n=config.max_n,
            defaults=model.defaults,
        )

    # --- endpoints ----------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, parse_chat)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate(request, parse_completion)

    async def _generate(self, request: Request, parse: Callable[[bytes, Limits], Ask]) -> ASGIApp:
        arrived = self.senses.clock()
        tenant = self._admit(request)
        data = await self._body(request)
        ask, prompts = await self._off_loop(len(data), lambda: self._understand(parse(data, self._limits), tenant))
        return Exchange(
            prompts,
            self._voice(ask, prompts[0][0].request_id.rpartition(".")[0]),
            ask.stream,
            ask.stop,
            self.model.tokenizer.detokenizer,
            self.dispatcher,
            self.metrics,
            clock=self.senses.clock,
            arrived=arrived,
            timeout_s=self.config.request_timeout_s,
        )

    async def tokenize(self, request: Request) -> Response:
        self._admit(request)
        data = await self._body(request)

        def work() -> list[int]:
            body = parse_tokenize(data, self._limits)
            if body.messages is not None:
                return self._chat_tokens(check_messages(body.messages))
            return self.model.tokenizer.encode(body.text or "", special=body.add_special_tokens is not False)

        tokens = await self._off_loop(len(data), work)
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": self._limits.context_tokens})

    async def models(self, request: Request) -> Response:
        self.tenants.authenticate(request.headers.get("authorization"))
        return json_response({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self.tenants.authenticate(request.headers.get("authorization"))
        name = request.path_params["name"]
        if name != self.model.name:
            message = f"the model '{name}' does not exist; this server serves '{self.model.name}'"
            raise RequestError(message, status=404, param="model", code="model_not_found")
        return json_response(self._model())

    async def live(self, request: Request) -> Response:
        return json_response({"status": "live"})

    async def ready(self, request: Request) -> Response:
        """200 while a decode-capable engine is connected and the gateway accepts requests; else 503 with reasons.

        A gateway that strangers can reach tells what is inside only to those who have a key."""
        reasons = []
        if self.draining:
            reasons.append("the gateway is shutting down")
        if not self.dispatcher.fleet.can_decode():
            reasons.append("no engine that can decode is connected")
            reasons += [client.trouble for client in self.dispatcher.clients if not client.connected]
        engines = [
            {
                "engine_id": state.hello.engine_id,
                "role": state.hello.role,
                "pid": state.hello.pid,
                "load": state.load,
            }
            for state in self.dispatcher.fleet.engines.values()
        ]
        body: dict[str, object] = {"status": "not ready" if reasons else "ready"}
        try:
            self._insider(request)
            body |= {"reasons": reasons, "engines": engines}
        except RequestError:
            log.debug("health asked without a key: status only")
        return json_response(body, 503 if reasons else 200)

    def _insider(self, request: Request) -> None:
        """Raises RequestError (401) for someone who may come from another machine and has no key."""
        if not is_loopback(self.config.host):
            self.tenants.authenticate(request.headers.get("authorization"))

    async def expose_metrics(self, request: Request) -> Response:
        self._insider(request)
        waiting = self.dispatcher.admission.waiting
        running = len(self.dispatcher.calls) - waiting
        data = self.metrics.expose(self.dispatcher.fleet, waiting, running)
        return Response(data, media_type="text/plain; version=0.0.4; charset=utf-8")

    # --- shutting down ------------------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse what is new, wait for what runs, cancel what is left after `drain_timeout_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self.dispatcher.idle()
        except TimeoutError:
            log.warning("cancelling %d requests after the drain timeout", len(self.dispatcher.calls))
            self.cancel_all()

    def cancel_all(self) -> None:
        self.dispatcher.cancel_all(Unavailable("the gateway shuts down"))

    # --- steps --------------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> str:
        tenant = self.tenants.authenticate(request.headers.get("authorization"))
        if self.draining:
            raise Unavailable("the gateway is shutting down; try again")
        return tenant

    async def _body(self, request: Request) -> bytes:
        """Raises RequestError: 413 when it is too long, 408 when it takes too long to come."""
        wait_s = min(BODY_S, self.config.request_timeout_s)
        try:
            async with asyncio.timeout(wait_s):
                return await self._whole_body(request)
        except TimeoutError:
            late = f"the request body did not arrive within {wait_s:g} s"
            raise RequestError(late, status=408, code="request_timeout") from None

    async def _whole_body(self, request: Request) -> bytes:
        limit = self.config.max_body_bytes
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise RequestError(f"the request body exceeds {limit} bytes", status=413, code="body_too_large")
            chunks.append(chunk)
        return b"".join(chunks)

    async def _off_loop(self, size: int, work: Callable[[], T]) -> T:
        return work() if size <= INLINE_BYTES else await asyncio.to_thread(work)

    def _understand(self, ask: Ask, tenant: str) -> tuple[Ask, list[tuple[EngineRequest, PrefixChain | None]]]:
        """Raises RequestError. Touches nothing shared: may run in a thread."""
        answer_id = self.senses.random_bytes(12).hex()
        hash_key = self.tenants.hash_key(tenant)
        prompts: list[tuple[EngineRequest, PrefixChain | None]] = []
        for tokens in self._prompt_tokens(ask):
            seed = int.from_bytes(self.senses.random_bytes(8), "little")
            sampling = settle(ask, len(tokens), self._limits, seed)
            chain = PrefixChain(self.model.root, hash_key, self.model.info.layout.block_tokens)
            chain.extend(tokens)
            request = EngineRequest(
                request_id=f"{answer_id}.{len(prompts)}",
                tokens=tokens,
                sampling=sampling,
                n=ask.n,
                root=self.model.root,
                hash_key=hash_key,
                tenant=tenant,
                deadline_s=self.config.request_timeout_s,
            )
            prompts.append((request, chain))
        return ask, prompts

    def _prompt_tokens(self, ask: Ask) -> list[list[int]]:
        if ask.kind == "chat":
            return [self._chat_tokens(ask.messages)]
        encode = self.model.tokenizer.encode
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in ask.prompts]

    def _chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        # The template writes the special tokens that it wants itself.
        return self.model.tokenizer.encode(self.model.tokenizer.render(messages), special=False)

    def _voice(self, ask: Ask, answer_id: str) -> Voice:
        """The answer's id is what engines know the request by, so that one finds the other in logs."""
        prefix = "chatcmpl" if ask.kind == "chat" else "cmpl"
        return Voice(
            kind=ask.kind,
            id=f"{prefix}-{answer_id}",
            created=int(self.senses.unix_time()),
            model=self.model.name,
            logprobs=ask.sampling.logprobs is not None,
            include_usage=ask.include_usage,
            token_bytes=self.model.tokenizer.token_bytes,
        )

    def _model(self) -> dict[str, object]:
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "anabranch",
            "max_model_len": self._limits.context_tokens,
            "vocab_size": self._limits.vocab,
            "block_tokens": self.model.info.layout.block_tokens,
        }

    def _accept(self, hello: EngineHello) -> str:
        """An engine with other weights or another block size would answer wrongly, or never hit."""
        info = self.model.info
        if hello.identity != info.digest:
            return f"it runs another model ({hello.model}, {hello.identity.hex()[:16]}), not {info.digest.hex()[:16]}"
        if hello.block_tokens != info.layout.block_tokens:
            return f"its blocks have {hello.block_tokens} tokens, not {info.layout.block_tokens}"
        return ""


def json_response(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
