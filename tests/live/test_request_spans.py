"""Traces go through client and node; without them nothing is sent."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_processes import until

from anabranch.core.errors import ConfigError
from anabranch.core.live.tracing import Exporter, Tracing
from anabranch.store.values.config import StoreConfig
from anabranch.store.values.live.async_client import AsyncClient
from anabranch.store.values.live.client import Client
from anabranch.store.values.live.node_server import ValueNode
from anabranch.store.values.live.request_spans import NodeSpans, trace_client

sdk = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402


class Recorder:
    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = provider.get_tracer("test")
        self.tracing = Tracing(self.tracer)

    def named(self, name: str, count: int = 1) -> list[Any]:
        """Spans of this name; a node's end only after its answer has gone."""
        found: list[Any] = []

        def there() -> bool:
            found[:] = [span for span in self._spans.get_finished_spans() if span.name == name]
            return len(found) >= count

        until(there, f"{count} spans '{name}'")
        return found


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def node(recorder: Recorder, tmp_path: Path) -> Iterator[ValueNode]:
    running = ValueNode(
        "n1",
        StoreConfig(dram_bytes=4 << 20, listen="127.0.0.1:0"),
        arena_path=f"/dev/shm/anabranch-test-{os.getpid()}-{secrets.token_hex(4)}",
        data_dir=str(tmp_path),
        spans=NodeSpans(recorder.tracing, "n1"),
    )
    running.start()
    yield running
    running.stop()


def test_one_trace_goes_through_client_and_node(node: ValueNode, recorder: Recorder) -> None:
    with Client(node.address, local=False) as client:
        trace_client(client, recorder.tracing)
        with recorder.tracer.start_as_current_span("request") as request:
            client.put("a", b"1")
            assert client.get("a") == b"1"
        client.exists_many(["a"])
        session = client._session.id.hex()
    (put,), (get,) = recorder.named("store put_many"), recorder.named("store get")
    trace = request.get_span_context().trace_id
    assert {span.context.trace_id for span in (put, get)} == {trace}
    (there,) = recorder.named("node Get")
    assert there.context.trace_id == trace
    assert there.parent.span_id == get.context.span_id
    assert there.attributes["anabranch.session"] == get.attributes["anabranch.session"] == session
    assert (there.attributes["anabranch.node"], there.attributes["anabranch.items"]) == ("n1", 1)
    (exists,) = recorder.named("node Exists")
    assert exists.context.trace_id != trace


def test_a_lane_forgets_the_trace_of_the_call_before(node: ValueNode, recorder: Recorder) -> None:
    with Client(node.address, local=False) as client:
        get = client._get
        trace_client(client, recorder.tracing)
        client.put("a", b"1")
        assert client.get("a") == b"1"
        client._get = get  # type: ignore[method-assign]
        assert client.get("a") == b"1"
    first, second = recorder.named("node Get", 2)
    assert first.parent is not None
    assert second.parent is None


def test_coroutines_too(node: ValueNode, recorder: Recorder) -> None:
    async def main() -> None:
        async with AsyncClient(node.address, local=False) as client:
            trace_client(client, recorder.tracing)
            with recorder.tracer.start_as_current_span("request"):
                await client.put("a", b"1")
                assert await client.get("a") == b"1"

    asyncio.run(main())
    assert {
        span.context.trace_id for name in ("request", "store get", "node Get") for span in recorder.named(name)
    } == {recorder.named("request")[0].context.trace_id}


def test_who_does_not_trace_sends_no_context(node: ValueNode, recorder: Recorder) -> None:
    with Client(node.address, local=False) as client:
        client.put("a", b"1")
        client.get("a")
    assert all(span.parent is None for span in recorder.named("node Get"))


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match=r"trace\.endpoint"):
        Exporter("localhost", "n1")
