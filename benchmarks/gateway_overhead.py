"""What the gateway adds to each token: its CPU time, and the delay from the engine's send to the client's receive.

A gateway process sits between a fake engine and raw-socket clients, both in this process. In paced runs every stream
gets a token each 10 ms, as from a fast engine: one write per token and stream. Flat-out runs show the throughput. A
lone stream wakes the gateway for each token, which costs mostly kernel time; its figures stand beside the claim's.

    python benchmarks/gateway_overhead.py [--quick]

The last line is one JSON object. Claim: at most 0.3 ms of gateway CPU per streamed token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import selectors
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from anabranch.engine.runner import ModelInfo
from anabranch.engine.tripwire import tripwire_info
from anabranch.serving.config import GatewayConfig
from anabranch.serving.live.server import run_gateway
from anabranch.testing.fake_engine import FakeEngine
from anabranch.testing.live.gateway import wait_until

LIMIT_MS = 0.3
CONTEXT = 1 << 20
TOKEN_MARK = b'"delta":{"content":"'


class TimedEngine(FakeEngine):
    """Remembers when each token of each stream (told apart by seed) was sent."""

    def __init__(self, engine_id: str, step_s: float) -> None:
        self.sent: dict[int, list[float]] = defaultdict(list)
        super().__init__(engine_id, "both", step_s=step_s, context_tokens=CONTEXT)

    def _one_step(self) -> None:
        now = time.monotonic()
        for running in self._running.values():
            self.sent[running.request.sampling.seed].append(now)
        super()._one_step()


class Stream:
    """One client connection; notes when each token arrives."""

    def __init__(self, host: str, port: int, seed: int, tokens: int) -> None:
        self.seed = seed
        self.received: list[float] = []
        self.done = False
        self._tail = b""
        body = json.dumps(
            {
                "model": "tripwire",
                "messages": [{"role": "user", "content": f"stream number {seed}"}],
                "max_tokens": tokens,
                "seed": seed,
                "stream": True,
            }
        ).encode()
        self.sock = socket.create_connection((host, port))
        self.sock.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )

    def read(self) -> None:
        data = self.sock.recv(1 << 18)
        now = time.monotonic()
        seen = self._tail + data
        # The empty content beside the role does not match: the role comes first there.
        self.received += [now] * seen.count(TOKEN_MARK)
        self._tail = seen[-(len(TOKEN_MARK) - 1) :]
        if not data or b"data: [DONE]" in seen:
            self.done = True
            self.sock.close()


def serve(engine: str, folder: str, pipe: Connection) -> None:
    info: ModelInfo = tripwire_info(context_tokens=CONTEXT)
    run_gateway(GatewayConfig(port=0), info, engines=[engine], secret_dir=Path(folder), on_ready=pipe.send)


@contextmanager
def gateway(engine: TimedEngine, folder: str) -> Iterator[tuple[str, int, int]]:
    """Host, port and process id."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(engine.address, folder, theirs))
    process.start()
    try:
        host, port = ours.recv().removeprefix("http://").split(":")
        wait_until(lambda: bool(engine._links), "the gateway did not connect")
        yield host, int(port), process.pid or 0
    finally:
        process.terminate()
        process.join(20)


def cpu_s(pid: int) -> float:
    """Time on a CPU of all threads so far, to the nanosecond (Linux)."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def measure(streams: int, tokens: int, step_s: float, folder: str) -> dict[str, float]:
    """One run: CPU per token, delays, throughput."""
    with TimedEngine("fake", step_s) as engine, gateway(engine, folder) as (host, port, pid):
        drive(engine, host, port, streams, 20, first_seed=1000)  # imports, caches, branch predictors
        engine.sent.clear()
        cpu, start = cpu_s(pid), time.monotonic()
        clients = drive(engine, host, port, streams, tokens, first_seed=0)
        wall = time.monotonic() - start
        cpu = cpu_s(pid) - cpu
    delays: list[float] = []
    for client in clients:
        sent = engine.sent[client.seed]
        if len(sent) != tokens or len(client.received) != tokens:
            raise SystemExit(f"stream {client.seed}: {len(sent)} tokens sent, {len(client.received)} received")
        delays += [there - here for here, there in zip(sent, client.received, strict=True)]
    delays.sort()
    count = streams * tokens
    return {
        "streams": streams,
        "tokens": count,
        "step_ms": step_s * 1e3,
        "cpu_ms_per_token": cpu / count * 1e3,
        "delay_p50_ms": statistics.median(delays) * 1e3,
        "delay_p99_ms": delays[int(0.99 * len(delays))] * 1e3,
        "tokens_per_s": count / wall,
    }


def drive(engine: TimedEngine, host: str, port: int, streams: int, tokens: int, *, first_seed: int) -> list[Stream]:
    engine.hold()
    clients = [Stream(host, port, first_seed + number, tokens) for number in range(streams)]
    wait_until(lambda: engine.busy() == streams, "the requests did not arrive")
    engine.hold(False)
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.sock, selectors.EVENT_READ, client)
        while not all(client.done for client in clients):
            for key, _ in selector.select(30.0):
                client = key.data
                client.read()
                if client.done:
                    selector.unregister(key.fileobj)
    return clients


def machine() -> dict[str, object]:
    return {"cpus": os.cpu_count(), "arch": platform.machine(), "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run of each kind")
    quick = parser.parse_args().quick
    repeats = 1 if quick else 3
    tokens = 300 if quick else 1000
    paced, single, flat = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            paced.append(measure(16, tokens, 0.01, folder))
            single.append(measure(1, tokens, 0.005, folder))
            flat.append(measure(16, tokens * 4, 0.0, folder))
            for sample in (paced[-1], single[-1], flat[-1]):
                print("  ".join(f"{name} {value:.3f}" for name, value in sample.items()))
    one = statistics.median(sample["cpu_ms_per_token"] for sample in single)
    ours = statistics.median(sample["cpu_ms_per_token"] for sample in paced)
    print(
        json.dumps(
            {
                "claim": "gateway CPU per streamed token (16 paced streams), ms",
                "ours": round(ours, 4),
                "limit": LIMIT_MS,
                "ratio": round(ours / LIMIT_MS, 3),
                "holds": ours <= LIMIT_MS,
                "figures": {
                    "cpu_ms_per_token_1_stream": round(one, 4),
                    "delay_p50_ms_1_stream": round(statistics.median(s["delay_p50_ms"] for s in single), 3),
                    "delay_p50_ms_16_streams": round(statistics.median(s["delay_p50_ms"] for s in paced), 3),
                    "flat_out_cpu_ms_per_token": round(statistics.median(s["cpu_ms_per_token"] for s in flat), 4),
                    "flat_out_tokens_per_s": round(statistics.median(s["tokens_per_s"] for s in flat)),
                },
                "samples": {"paced": paced, "single": single, "flat_out": flat},
                "machine": machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
