"""The ASGI application around a gateway.

**Covers** routes, request ids, counting outcomes, and errors as OpenAI error bodies.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.core.errors import AnabranchError, Overloaded, RequestError, Retryable
from anabranch.serving.answers import error_body, http_status
from anabranch.serving.live.exchange import Outcome
from anabranch.serving.live.gateway import Gateway, json_response

log = logging.getLogger(__name__)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize")


class Frame:
    """Outermost layer: request ids, counting outcomes, and the outcome slot that endpoints fill in."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        outcome = scope["anabranch.outcome"] = Outcome()
        request_id = _request_id(scope) or self._gateway.senses.random_bytes(8).hex().encode()
        status = 500

        async def labelled(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, labelled)
        finally:
            endpoint = scope["path"] if scope["path"] in ENDPOINTS else "other"
            label = outcome.label or _outcome(status)
            self._gateway.metrics.requests.labels(endpoint, label).inc()
            if endpoint != "other":
                log.info("request %s: %s %s", request_id.decode(), endpoint, label)


def create_app(gateway: Gateway) -> ASGIApp:
    """The application. Its lifespan connects to the engines, and disconnects."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        gateway.dispatcher.start()
        try:
            yield
        finally:
            await gateway.dispatcher.close()

    routes = [
        Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/models", gateway.models),
        Route("/v1/models/{name:path}", gateway.one_model),
        Route("/tokenize", gateway.tokenize, methods=["POST"]),
        Route("/health", gateway.ready),
        Route("/health/ready", gateway.ready),
        Route("/health/live", gateway.live),
        Route("/metrics", gateway.expose_metrics),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            AnabranchError: _on_error,
            HTTPException: _on_http_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_bug,
        },
    )
    return Frame(app, gateway)


async def _on_error(request: Request, error: Exception) -> Response:
    known = error if isinstance(error, AnabranchError) else AnabranchError(str(error))
    status = http_status(known)
    response = json_response(error_body(known, status), status)
    if isinstance(known, Overloaded):
        response.headers["retry-after"] = str(math.ceil(known.retry_after_s))
    elif isinstance(known, Retryable):
        response.headers["retry-after"] = "1"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: f"no such endpoint: {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    detail = what.get(status, str(error))
    response = json_response(error_body(RequestError(detail, status=status, code="unknown_url"), status), status)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client left while sending: nobody reads this."""
    request.scope["anabranch.outcome"].label = "cancelled"
    return Response(status_code=400)


async def _on_bug(request: Request, error: Exception) -> Response:
    """Starlette raises the error again after this, so the server logs it."""
    return json_response(error_body(AnabranchError("internal error"), 500), 500)


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= 128 and all(0x21 <= byte < 0x7F for byte in value):
            return bytes(value)
    return b""


def _outcome(status: int) -> str:
    if status < 400:
        return "ok"
    named = {401: "unauthorized", 429: "overloaded", 503: "unavailable", 504: "timeout"}
    return named.get(status, "client_error" if status < 500 else "failed")
