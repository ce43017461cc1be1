"""Prometheus metrics of the gateway."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from anabranch.engine.request import Usage
from anabranch.policy.routing import Route
from anabranch.serving.fleet import Fleet

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
ROLES = ("prefill", "decode", "both")


class GatewayMetrics:
    """Sums agree: prompt tokens over all sources = prompt tokens of requests whose prompt was computed, each once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.requests = Counter(
            "anabranch_requests", "Requests by endpoint and outcome.", ["endpoint", "outcome"], registry=registry
        )
        self._prompt_tokens = Counter(
            "anabranch_prompt_tokens", "Prompt tokens by where their K/V came from.", ["source"], registry=registry
        )
        self.generated_tokens = Counter("anabranch_generated_tokens", "Tokens generated.", registry=registry)
        self.ttft = Histogram("anabranch_ttft_seconds", "Time to first token.", buckets=TTFT_BUCKETS, registry=registry)
        self.tpot = Histogram(
            "anabranch_tpot_seconds", "Mean time per later token.", buckets=TPOT_BUCKETS, registry=registry
        )
        self._routes = Counter("anabranch_routes", "Attempts by kind of route.", ["kind"], registry=registry)
        self._retries = Counter("anabranch_retries", "Attempts after the first.", registry=registry)
        self._waiting = Gauge("anabranch_requests_waiting", "Prompts before their first token.", registry=registry)
        self._running = Gauge("anabranch_requests_running", "Prompts after their first token.", registry=registry)
        self._engines = Gauge("anabranch_engines", "Connected engines.", ["role"], registry=registry)
        for source in ("computed", "dram", "ssd", "peer"):
            self._prompt_tokens.labels(source)

    def routed(self, route: Route, attempt: int) -> None:
        self._routes.labels(route.kind).inc()
        if attempt > 1:
            self._retries.inc()

    def computed(self, usage: Usage, prompt_tokens: int) -> None:
        self._prompt_tokens.labels("computed").inc(max(0, prompt_tokens - usage.cached))
        self._prompt_tokens.labels("dram").inc(usage.dram)
        self._prompt_tokens.labels("ssd").inc(usage.ssd)
        self._prompt_tokens.labels("peer").inc(usage.peer)

    def finished(self, first_s: float, last_s: float, tokens: Iterable[int]) -> None:
        """`first_s`, `last_s`: seconds from arrival to the first and the last token; `tokens` per choice."""
        counts = list(tokens)
        self.generated_tokens.inc(sum(counts))
        self.ttft.observe(first_s)
        if max(counts, default=0) > 1:
            self.tpot.observe((last_s - first_s) / (max(counts) - 1))

    def expose(self, fleet: Fleet, waiting: int, running: int) -> bytes:
        self._waiting.set(waiting)
        self._running.set(running)
        for role in ROLES:
            self._engines.labels(role).set(sum(state.hello.role == role for state in fleet.engines.values()))
        return generate_latest(self._registry)
