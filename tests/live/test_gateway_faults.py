"""Disconnects, lost and silent engines, refusals and shutdown, over real sockets."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from anabranch.engine.messages import Cancel, Prefill, Prepare, Start, Submit
from anabranch.serving.actions import Waits
from anabranch.serving.config import GatewayConfig
from anabranch.testing.fake_engine import FakeEngine, disconnect, fail, fake_answer, hang
from anabranch.testing.live.gateway import RunningGateway, running_gateway, wait_until

LONG = "a prompt of more than a few blocks " * 8


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": "tripwire", "prompt": LONG, "max_tokens": 40, "seed": 3, **fields}


@contextlib.contextmanager
def engines(*names: str, **options: Any) -> Iterator[list[FakeEngine]]:
    roles = {"p": "prefill", "d": "decode", "b": "both"}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeEngine(name, roles[name[0]], **options)) for name in names]


def text_of(response: httpx.Response) -> str:
    events = [json.loads(event[6:]) for event in response.text.strip().split("\n\n")[:-1]]
    return "".join(choice["text"] for event in events for choice in event["choices"] if choice["index"] == 0)


def answer(engine_requests: list[Any], index: int = 0) -> str:
    return bytes(fake_answer(engine_requests[0].request, index)).decode()


@contextlib.contextmanager
def raw_post(url: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that leaves, without reading, at the end of the block."""
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + data)
        yield


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hung", ["prepare", "prefill", "start"])
def test_a_client_that_leaves_frees_every_engine(hung: str, stream: bool) -> None:
    with engines("p", "d") as (prefill, decode), running_gateway([prefill, decode]) as running:
        where = prefill if hung == "prefill" else decode
        where.faults[hung].append(hang)
        kind = {"prepare": Prepare, "prefill": Prefill, "start": Start}[hung]
        with raw_post(running.url, ask(stream=stream)):
            assert where.wait(lambda: bool(where.requests(kind)))
        assert decode.wait(lambda: bool(decode.requests(Cancel)))
        assert decode.wait(lambda: decode.busy() == 0)
        if hung != "prepare":
            assert prefill.wait(lambda: bool(prefill.requests(Cancel)))
        wait_until(lambda: not running.gateway.dispatcher.calls, "the gateway kept the call")
        assert running.gateway.dispatcher.admission.waiting == 0


def test_a_client_that_leaves_mid_stream_frees_the_engine() -> None:
    with engines("b") as (engine,), running_gateway([engine]) as running:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=ask(stream=True, max_tokens=7000)) as response:
            next(response.iter_bytes())
            engine.hold()
        assert engine.wait(lambda: bool(engine.requests(Cancel)))
        assert engine.busy() == 0
        wait_until(lambda: not running.gateway.dispatcher.calls, "the gateway kept the call")
        metrics = httpx.get(f"{running.url}/metrics").text
        assert 'endpoint="/v1/completions",outcome="cancelled"} 1.0' in metrics


def test_a_client_that_stops_reading_is_cut_off() -> None:
    with engines("b") as (engine,), running_gateway([engine]) as running:
        with raw_post(running.url, ask(stream=True, max_tokens=7000, n=16)):
            assert engine.wait(lambda: bool(engine.requests(Submit)))
            assert httpx.post(f"{running.url}/v1/completions", json=ask(), timeout=60.0).status_code == 200
            slow = engine.requests(Submit)[0].request.request_id
            assert engine.wait(lambda: any(cancel.request_id == slow for cancel in engine.requests(Cancel)), 60.0)
            wait_until(lambda: not running.gateway.dispatcher.calls, "the gateway kept the call", 60.0)
            wait_until(lambda: not running.server.server_state.tasks, "the gateway kept the exchange", 60.0)
            wait_until(lambda: not running.server.server_state.connections, "the connection stayed open", 60.0)
            wait_until(
                lambda: 'outcome="slow_reader"} 1.0' in httpx.get(f"{running.url}/metrics").text, "it was not counted"
            )
        assert engine.busy() == 0
        assert httpx.post(f"{running.url}/v1/completions", json=ask(), timeout=60.0).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"presence_penalty": 0.5}, {"stream": False}],
    ids=["resume", "replay-n", "replay", "whole"],
)
def test_an_engine_killed_mid_answer_does_not_lose_it(fields: dict[str, Any]) -> None:
    with engines("p", "d0", "d1") as (prefill, first, second), running_gateway([prefill, first, second]) as running:
        first.cut_after = 11
        body = ask(stream=True, **fields) if "stream" not in fields else ask(**fields)
        response = httpx.post(f"{running.url}/v1/completions", json=body, timeout=30.0)
        original = prefill.requests(Prefill)
        assert first.requests(Prepare)
        assert second.requests(Prepare)
        whole = answer(original)
        if body["stream"]:
            assert text_of(response) == whole
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["choices"][0]["text"] == whole
        resumed = original[-1].request.tokens != original[0].request.tokens
        assert resumed == ("n" not in fields and "presence_penalty" not in fields)


@pytest.mark.parametrize("step", ["prepare", "prefill", "start"])
@pytest.mark.parametrize("fault", [fail(), disconnect])
def test_a_failure_at_any_step_is_tried_again(step: str, fault: Callable[..., None]) -> None:
    with engines("p", "d") as (prefill, decode), running_gateway([prefill, decode]) as running:
        (prefill if step == "prefill" else decode).faults[step].append(fault)
        response = httpx.post(f"{running.url}/v1/completions", json=ask(stream=True), timeout=30.0)
        assert text_of(response) == answer(decode.requests(Prepare))
        assert decode.wait(lambda: decode.busy() == 0)


def test_a_stopped_engine_is_noticed_and_its_work_moves_on() -> None:
    with engines("b0", "b1") as (first, second), running_gateway([first, second]) as running:
        first.hold()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(httpx.post, f"{running.url}/v1/completions", json=ask(), timeout=60.0)
            assert first.wait(lambda: bool(first.requests(Submit)))
            first.silence()
            text = future.result(60.0).json()["choices"][0]["text"]
        assert text == answer(first.requests(Submit))
        assert second.requests(Submit)
        first.silence(False)
        wait_until(lambda: len(running.gateway.dispatcher.fleet.engines) == 2, "the engine did not come back")


def test_an_error_after_the_first_token_is_an_event_without_an_end_mark() -> None:
    config = GatewayConfig(port=0, retries=0)
    with engines("b") as (engine,), running_gateway([engine], config=config) as running:
        engine.cut_after = 5
        response = httpx.post(f"{running.url}/v1/completions", json=ask(stream=True), timeout=30.0)
        assert response.status_code == 200
        last = json.loads(response.text.strip().split("\n\n")[-1][6:])
        assert last["error"]["type"] == "server_error"
        assert "[DONE]" not in response.text
        wait_until(lambda: running.gateway.dispatcher.fleet.can_decode(), "the engine did not come back")
        engine.cut_after = engine.tokens_sent + 5
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.completions.create(model="tripwire", prompt=LONG, max_tokens=40, stream=True)
            with pytest.raises(openai.APIError, match="was lost"):
                list(stream)


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (fail("overloaded", retry_after_s=7.0), 429, "overloaded"),
        (fail("context_length_exceeded", retryable=False), 400, "context_length_exceeded"),
        (fail("invariant_broken", retryable=False), 500, "internal_error"),
    ],
)
def test_a_refusal_before_the_first_token_has_an_honest_status(
    fault: Callable[..., None], status: int, code: str
) -> None:
    with engines("b") as (engine,), running_gateway([engine]) as running:
        engine.faults["submit"].append(fault)
        response = httpx.post(f"{running.url}/v1/completions", json=ask(stream=True))
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert response.headers.get("retry-after") == ("7" if status == 429 else None)
        assert httpx.post(f"{running.url}/v1/completions", json=ask()).status_code == 200


def test_a_request_that_takes_too_long_is_504_and_freed() -> None:
    config = GatewayConfig(port=0, request_timeout_s=0.3)
    with engines("b") as (engine,), running_gateway([engine], config=config) as running:
        engine.hold()
        assert httpx.post(f"{running.url}/v1/completions", json=ask(), timeout=30.0).status_code == 504
        assert engine.wait(lambda: engine.busy() == 0)


def test_without_engines_readiness_is_red_and_requests_are_503() -> None:
    waits = Waits(engine_s=0.2)
    nobody = "127.0.0.1:1"
    with running_gateway([nobody], waits=waits, wait_ready=False) as running:
        ready = httpx.get(f"{running.url}/health/ready")
        assert ready.status_code == 503
        wait_until(
            lambda: "cannot connect to 127.0.0.1:1" in httpx.get(f"{running.url}/health").text, "no reason was given"
        )
        assert httpx.get(f"{running.url}/health/live").status_code == 200
        refused = httpx.post(f"{running.url}/v1/completions", json=ask(), timeout=30.0)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_an_engine_that_comes_late_serves_what_waits(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/late"
    with running_gateway([address], wait_ready=False) as running:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(httpx.post, f"{running.url}/v1/completions", json=ask(), timeout=60.0)
            wait_until(lambda: len(running.gateway.dispatcher.calls) == 1, "the request did not arrive")
            with FakeEngine("late", address=address) as engine:
                text = future.result(60.0).json()["choices"][0]["text"]
                assert text == answer(engine.requests(Submit))
                assert httpx.get(f"{running.url}/health/ready").status_code == 200
        wait_until(lambda: httpx.get(f"{running.url}/health/ready").status_code == 503, "readiness stayed green")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"identity": b"other weights"}, "another model"), ({"block_tokens": 32}, "blocks have 32 tokens")],
)
def test_an_engine_with_another_model_is_refused(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engines("b", **options) as (engine,), running_gateway([engine], wait_ready=False) as running:
        wait_until(lambda: reason in httpx.get(f"{running.url}/health/ready").text, "the engine was not refused")
        assert not running.gateway.dispatcher.fleet.engines
    assert reason in caplog.text


def test_two_engines_of_one_name() -> None:
    with engines("b", "b") as (first, second), running_gateway([first, second], wait_ready=False) as running:
        troubles = running.gateway.dispatcher.clients
        wait_until(lambda: any("under the name b" in client.trouble for client in troubles), "both were accepted")
        assert httpx.post(f"{running.url}/v1/completions", json=ask(), timeout=30.0).status_code == 200


def stream_until_stopped(running: RunningGateway, engine: FakeEngine, drain: Callable[[], None]) -> httpx.Response:
    """Begin a stream, ask the gateway to stop, and let `drain` decide how it goes on."""
    engine.hold()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(httpx.post, f"{running.url}/v1/completions", json=ask(stream=True), timeout=60.0)
        assert engine.wait(lambda: bool(engine.requests(Submit)))
        running.stop()
        drain()
        return future.result(60.0)


def test_shutdown_lets_running_requests_finish_and_refuses_new_ones() -> None:
    with engines("b") as (engine,), running_gateway([engine]) as running:

        def drain() -> None:
            wait_until(lambda: running.gateway.draining, "the gateway did not drain")
            ready = httpx.get(f"{running.url}/health/ready")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["the gateway is shutting down"])
            assert httpx.get(f"{running.url}/health/live").status_code == 200
            refused = httpx.post(f"{running.url}/v1/completions", json=ask())
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            engine.hold(False)

        response = stream_until_stopped(running, engine, drain)
        assert text_of(response) == answer(engine.requests(Submit))
        running.thread.join(20.0)
        assert not running.thread.is_alive()


def test_a_body_that_does_not_come_is_given_up() -> None:
    with (
        engines("b") as (engine,),
        running_gateway([engine], config=GatewayConfig(port=0, request_timeout_s=0.3)) as it,
    ):
        host, port = it.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30.0) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def test_shutdown_cancels_what_outlives_the_drain_timeout() -> None:
    config = GatewayConfig(port=0, drain_timeout_s=0.1)
    with engines("b") as (engine,), running_gateway([engine], config=config) as running:
        response = stream_until_stopped(running, engine, lambda: None)
        assert response.status_code == 503
        assert engine.wait(lambda: engine.busy() == 0)
        running.thread.join(20.0)
        assert not running.thread.is_alive()
