"""Spans of a client's calls and of a node's requests, one trace through both.

A span names the session and the operation that logs and messages carry too: `anabranch.session`, `anabranch.op`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from anabranch.core.live.tracing import Tracing
from anabranch.store.values.live.async_client import AsyncClient
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.client import Client
from anabranch.store.values.live.node_custody import NodeSession
from anabranch.store.values.live.node_lane import NodeLane

CALLS = (
    "_put_many",
    "_get",
    "_get_many_into",
    "_acquire",
    "_exists_many",
    "_remove",
    "_invalidate",
    "_pin",
    "_prefetch",
)


def trace_client(client: Client | AsyncClient, tracing: Tracing) -> None:
    """From now on each call of this client is a span, child of the caller's current one, and nodes that trace add
    theirs below it."""
    inner = client
    if isinstance(client, AsyncClient):
        inner = client._client
        _carry_context(client)
    for name in CALLS:
        setattr(inner, name, _spanned(inner, name, tracing))


class NodeSpans:
    """For `ValueNode`: puts a span around what answers a request."""

    def __init__(self, tracing: Tracing, node_id: str) -> None:
        self._tracing = tracing
        self._node_id = node_id

    def around(self, name: str, answer: Callable[[NodeLane, NodeSession, Any], Any]) -> Callable[..., Any]:
        """The same handler, with a span. It is the caller's child if the caller traces."""

        def spanned(lane: NodeLane, session: NodeSession, message: Any) -> Any:
            offer = getattr(message, "offer", message)
            attributes = {
                "anabranch.node": self._node_id,
                "anabranch.session": session.id[0].hex(),
                "anabranch.tenant": session.caller.tenant,
                "anabranch.op": getattr(offer, "op", 0),
                "anabranch.items": len(getattr(offer, "names", b"")) // 32,
            }
            with self._tracing.span(f"node {name}", attributes, parent=lane.trace, server=True):
                return answer(lane, session, message)

        return spanned


def _spanned(client: Any, name: str, tracing: Tracing) -> Callable[..., Any]:
    method = getattr(client, name)
    session = client._session.id.hex()
    shown = name.strip("_")

    def spanned(*arguments: Any) -> Any:
        call = next(argument for argument in arguments if isinstance(argument, Call))
        first = arguments[0]
        attributes = {"anabranch.session": session, "anabranch.items": len(first) if isinstance(first, list) else 1}
        with tracing.span(f"store {shown}", attributes):
            call.trace = tracing.context()
            return method(*arguments)

    return spanned


def _carry_context(client: AsyncClient) -> None:
    """The coroutine's current span is the parent of what its call does on another thread."""
    run = client._run

    async def carried(work: Callable[[Call], Any], **options: Any) -> Any:
        context = copy_context()
        return await run(lambda call: context.run(work, call), **options)

    client._run = carried  # type: ignore[method-assign]
