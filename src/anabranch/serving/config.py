"""Settings of the gateway."""

from __future__ import annotations

import msgspec


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`api_keys_file`: JSON object {api key: tenant}; with none, everybody is tenant "default" and the gateway refuses
    to bind beyond loopback."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys_file: str = ""
    max_queue: int = 256
    request_timeout_s: float = 600.0
    max_n: int = 16
    max_body_bytes: int = 8 << 20
    drain_timeout_s: float = 30.0
    retries: int = 2
