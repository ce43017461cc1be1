"""HTTP for machines that watch: `/metrics` (Prometheus), `/healthz` (is the path of the bytes open?), `/livez`.

Answers carry counts and tenants' names, no keys and no values. Nothing is asked of the caller: bind it where only the
monitoring reaches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from anabranch.core.errors import AnabranchError, ConfigError, MissingExtra, Unavailable
from anabranch.store.messages import Stat
from anabranch.store.metrics import Family, Role, families

PROBE_FRESH_S = 1.0
log = logging.getLogger(__name__)


class MetricsServer:
    """`stat`: the process's own figures. `probe`: raises an AnabranchError if it does not serve; blocks at most some
    seconds and is asked at most once in PROBE_FRESH_S.

    Raises ConfigError for an address that is none, Unavailable if it is in use, MissingExtra without prometheus-client.
    """

    def __init__(self, address: str, role: Role, stat: Callable[[], Stat], probe: Callable[[], None]) -> None:
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            raise MissingExtra("serve", "prometheus_client") from error
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(role, stat))
        health = _Health(probe)

        class Handler(BaseHTTPRequestHandler):
            server_version = "anabranch"
            sys_version = ""
            timeout = 10.0

            def do_GET(self) -> None:  # the name that http.server calls
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(
                        200, prometheus_client.generate_latest(registry), prometheus_client.CONTENT_TYPE_LATEST
                    )
                elif path == "/healthz":
                    reason = health.reason()
                    self._answer(503 if reason else 200, f"{reason or 'ok'}\n".encode())
                elif path == "/livez":
                    self._answer(200, b"ok\n")
                else:
                    self._answer(404, b"/metrics, /healthz or /livez\n")

            def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                log.debug(format, *args)

        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"--metrics {address}: expected host:port, e.g. 127.0.0.1:9070")
        try:
            self._server = ThreadingHTTPServer((host, int(port)), Handler)
        except OSError as error:
            raise Unavailable(f"cannot serve metrics on {address}: {error.strerror}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5.0)
        self._server.server_close()


class _Health:
    def __init__(self, probe: Callable[[], None]) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._asked = float("-inf")
        self._reason = ""

    def reason(self) -> str:
        """Why the process does not serve, or empty."""
        with self._lock:
            if time.monotonic() - self._asked > PROBE_FRESH_S:
                try:
                    self._probe()
                    self._reason = ""
                except AnabranchError as error:
                    self._reason = str(error)
                self._asked = time.monotonic()
            return self._reason


class _Collector:
    """Prometheus asks, the process's own counters answer: nothing is counted twice."""

    def __init__(self, role: Role, stat: Callable[[], Stat]) -> None:
        self._role = role
        self._stat = stat

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in families(self._stat(), self._role):
            labels = sorted({label for sample in family.samples for label in sample.labels})
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            yield _filled(kind(family.name, family.help, labels=labels), family, labels)


def _filled(metric: Any, family: Family, labels: list[str]) -> Any:
    for sample in family.samples:
        metric.add_metric([sample.labels.get(label, "") for label in labels], sample.value)
    return metric
