"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`api_keys_file`: JSON object {api key: tenant}; with none, everybody is tenant "default" and the gateway refuses
    to bind beyond loopback."""

    host: Annotated[str, Meta(description="Address to bind.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="Port to bind; 0 = any free one.")] = 8000
    api_keys_file: Annotated[str, Meta(description="JSON object {api key: tenant}; empty = no keys.")] = ""
    max_queue: Annotated[
        int, Meta(ge=1, description="Requests waiting for their first token before new ones get 429.")
    ] = 256
    request_timeout_s: Annotated[float, Meta(gt=0, description="A request that takes longer is cancelled.")] = 600.0
    max_n: Annotated[int, Meta(ge=1, description="Largest `n` of a request.")] = 16
    max_body_bytes: Annotated[int, Meta(gt=0, description="Largest request body.")] = 8 << 20
    drain_timeout_s: Annotated[float, Meta(ge=0, description="How long a shutdown waits for running requests.")] = 30.0
    retries: Annotated[int, Meta(ge=0, description="Tries again after an engine was lost or refused a request.")] = 2
