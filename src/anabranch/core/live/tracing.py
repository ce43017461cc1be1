"""OpenTelemetry spans, for those who want them: without a `Tracing` no code of it runs.

Contexts travel as W3C traceparent text (https://www.w3.org/TR/trace-context, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anabranch.core.errors import ConfigError, MissingExtra


class Tracing:
    """`tracer`: of the OpenTelemetry API; where its spans go is the provider's business."""

    def __init__(self, tracer: Any) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise MissingExtra("otel", "opentelemetry") from error
        self._trace = trace
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(
        self, name: str, attributes: Mapping[str, str | int | bool], *, parent: str = "", server: bool = False
    ) -> Iterator[Any]:
        """A span around what is done within; an exception is recorded and goes on. `parent`: traceparent of another
        process; empty: the current span, if there is one."""
        kind = self._trace.SpanKind.SERVER if server else self._trace.SpanKind.CLIENT
        context = self._propagator.extract({"traceparent": parent}) if parent else None
        with self._tracer.start_as_current_span(name, context=context, kind=kind, attributes=dict(attributes)) as span:
            yield span

    def context(self) -> str:
        """The current span as traceparent, empty if it is not recorded."""
        if not self._trace.get_current_span().is_recording():
            return ""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier.get("traceparent", "")


class Exporter:
    """Spans to an OTLP/HTTP endpoint, in batches, on a thread of its own. `share`: how many of the traces that begin
    here; one that began elsewhere is followed if that side records it. Raises MissingExtra, ConfigError."""

    def __init__(self, endpoint: str, service: str, share: float = 1.0) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f'trace.endpoint = "{endpoint}": expected http://HOST:4318/v1/traces')
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ModuleNotFoundError as error:
            raise MissingExtra("otel", "opentelemetry") from error
        resource = Resource.create({"service.name": "anabranch", "service.instance.id": service})
        self._provider = TracerProvider(resource=resource, sampler=ParentBasedTraceIdRatio(share))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
        self.tracing = Tracing(self._provider.get_tracer("anabranch"))

    def close(self) -> None:
        """What was recorded is sent first, for at most some seconds."""
        self._provider.shutdown()
