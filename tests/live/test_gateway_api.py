"""The gateway as the official client sees it, over fake engines and real sockets."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from collections.abc import Iterator

import httpx
import openai
import pytest

from anabranch.engine.messages import Prefill, Start, Submit
from anabranch.serving.config import GatewayConfig
from anabranch.testing.fake_engine import FakeEngine, fake_answer
from anabranch.testing.live.gateway import RunningGateway, running_gateway, wait_until

LONG = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 8}]


class Bench:
    def __init__(self, running: RunningGateway, prefill: FakeEngine, decode: FakeEngine) -> None:
        self.running = running
        self.url = running.url
        self.prefill = prefill
        self.decode = decode
        self.client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with FakeEngine("p", "prefill") as prefill, FakeEngine("d", "decode") as decode:
        with running_gateway([prefill, decode]) as running:
            one = Bench(running, prefill, decode)
            try:
                yield one
            finally:
                one.client.close()
        assert (prefill.busy(), decode.busy()) == (0, 0)


def expected(bench: Bench, seed: int, index: int = 0) -> str:
    """The answer to the last request with this seed, computed from what an engine was asked."""
    asked = [message.request for message in bench.prefill.requests(Prefill) + bench.decode.requests(Submit)]
    last = [request for request in asked if request.sampling.seed == seed][-1]
    return bytes(fake_answer(last, index)).decode()


def test_chat(bench: Bench) -> None:
    answer = bench.client.chat.completions.create(model="tripwire", messages=LONG, max_tokens=12, seed=4)
    asked = bench.prefill.requests(Prefill)[-1].request
    assert answer.id == f"chatcmpl-{asked.request_id.split('.')[0]}"
    assert answer.choices[0].message.content == expected(bench, 4)
    assert answer.choices[0].finish_reason == "length"
    assert asked.sampling.seed == 4
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (12, answer.usage.prompt_tokens + 12)


def test_usage_tells_where_the_prompt_came_from(bench: Bench) -> None:
    messages = [{"role": "user", "content": "tell me of tiers " * 20}]
    usages = [
        bench.client.chat.completions.create(model="tripwire", messages=messages, max_tokens=3).usage for _ in range(2)
    ]
    for usage, cached in zip(usages, (False, True), strict=True):
        assert usage is not None
        tiers = usage.model_extra["anabranch"]
        assert sum(tiers.values()) == usage.prompt_tokens
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - tiers["computed"]
        assert (tiers["dram"] > 0) == cached


def test_streamed_chat(bench: Bench) -> None:
    stream = bench.client.chat.completions.create(
        model="tripwire", messages=LONG, max_tokens=9, stream=True, stream_options={"include_usage": True}, n=2, seed=5
    )
    chunks = list(stream)
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for index in range(2):
        deltas = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(delta.delta.content or "" for delta in deltas) == expected(bench, 5, index)
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 18
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_raw_stream_ends_with_done(bench: Bench) -> None:
    body = {"model": "tripwire", "messages": LONG, "max_tokens": 3, "stream": True}
    response = httpx.post(f"{bench.url}/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-1])


def test_log_probabilities(bench: Bench) -> None:
    answer = bench.client.chat.completions.create(
        model="tripwire", messages=LONG, max_tokens=3, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]
    plain = bench.client.completions.create(model="tripwire", prompt="abc", max_tokens=3, logprobs=1)
    assert plain.choices[0].logprobs.text_offset == [0, 1, 2]


def test_completions_of_several_prompts(bench: Bench) -> None:
    answer = bench.client.completions.create(
        model="tripwire", prompt=[[104, 105], [106, 107, 108]], max_tokens=4, n=2, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    first, second = (message.request for message in bench.decode.requests(Submit)[-2:])
    texts = [bytes(fake_answer(request, index)).decode() for request in (first, second) for index in range(2)]
    assert [choice.text for choice in answer.choices] == texts
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 16)


def test_stop_strings_end_the_answer_and_free_the_engine(bench: Bench) -> None:
    ask = {"model": "tripwire", "messages": LONG, "max_tokens": 2000, "seed": 9}
    whole = bench.client.chat.completions.create(**{**ask, "max_tokens": 40}).choices[0].message.content
    stop = whole[20:23]
    before = whole[: whole.find(stop)]
    answer = bench.client.chat.completions.create(**ask, stop=[stop, "never"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (before, "stop")
    chunks = list(bench.client.chat.completions.create(**ask, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == before
    assert bench.decode.wait(lambda: bench.decode.busy() == 0)


def test_stop_tokens(bench: Bench) -> None:
    answer = bench.client.completions.create(
        model="tripwire",
        prompt=LONG[0]["content"],
        max_tokens=500,
        seed=6,
        extra_body={"stop_token_ids": list(range(97, 110))},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == expected(bench, 6)[:-1]


def test_several_turns_reuse_the_answer_too(bench: Bench) -> None:
    messages = [{"role": "user", "content": "once upon a time " * 12}]
    first = bench.client.chat.completions.create(model="tripwire", messages=messages, max_tokens=64)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "go on"},
    ]
    submits = len(bench.decode.requests(Submit))
    bench.client.chat.completions.create(model="tripwire", messages=messages, max_tokens=4)
    # Only a few tokens are new at the decode engine, so it serves the turn alone.
    assert len(bench.decode.requests(Submit)) == submits + 1


def test_many_at_once(bench: Bench) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.chat.completions.create(
            model="tripwire",
            messages=[{"role": "user", "content": f"{number} " * 60}],
            max_tokens=30,
            seed=number,
            stream=bool(number % 2),
        )
        if number % 2:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        else:
            text = stream.choices[0].message.content
        assert text == expected(bench, number)

    async def everyone() -> None:
        async with openai.AsyncOpenAI(base_url=f"{bench.url}/v1", api_key="x", max_retries=0) as client:
            await asyncio.gather(*(one(client, 1000 + number) for number in range(24)))

    asyncio.run(everyone())
    assert len(bench.decode.requests(Start)) >= 24
    assert not bench.running.gateway.dispatcher.calls


def test_errors_are_openai_errors(bench: Bench) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        bench.client.chat.completions.create(model="gpt", messages=LONG)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        bench.client.chat.completions.create(model="tripwire", messages=[{"role": "robot", "content": "x"}])
    assert bad.value.param == "messages[0].role"
    with pytest.raises(openai.BadRequestError) as long:
        bench.client.completions.create(model="tripwire", prompt="x" * 9000)
    assert long.value.code == "context_length_exceeded"
    broken = httpx.post(f"{bench.url}/v1/chat/completions", content=b"{")
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert httpx.get(f"{bench.url}/v1/nothing").status_code == 404
    wrong = httpx.get(f"{bench.url}/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    large = httpx.post(f"{bench.url}/v1/completions", content=b" " * (9 << 20))
    assert large.status_code == 413


def test_models_and_tokenize(bench: Bench) -> None:
    assert [model.id for model in bench.client.models.list()] == ["tripwire"]
    card = bench.client.models.retrieve("tripwire").model_dump()
    assert (card["id"], card["max_model_len"], card["vocab_size"], card["block_tokens"]) == ("tripwire", 8192, 256, 16)
    with pytest.raises(openai.NotFoundError):
        bench.client.models.retrieve("gpt")
    answer = httpx.post(f"{bench.url}/tokenize", json={"text": "hé"}).json()
    assert answer == {"tokens": [104, 195, 169], "count": 3, "max_model_len": 8192}
    chat = httpx.post(f"{bench.url}/tokenize", json={"messages": [{"role": "user", "content": "a"}]}).json()
    assert bytes(chat["tokens"]).decode() == "user: a\nassistant: "
    big = httpx.post(f"{bench.url}/tokenize", json={"text": "x" * 100_000}).json()
    assert big["count"] == 100_000


def test_request_ids(bench: Bench) -> None:
    assert httpx.get(f"{bench.url}/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = {httpx.get(f"{bench.url}/health").headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    with pytest.raises(openai.NotFoundError) as missing:
        bench.client.chat.completions.create(model="gpt", messages=LONG, extra_headers={"x-request-id": "abc-2"})
    assert missing.value.request_id == "abc-2"


def test_health(bench: Bench) -> None:
    assert httpx.get(f"{bench.url}/health/live").status_code == 200
    ready = httpx.get(f"{bench.url}/health/ready")
    assert ready.status_code == 200
    assert {engine["engine_id"] for engine in ready.json()["engines"]} == {"p", "d"}


def test_metrics_add_up(bench: Bench) -> None:
    sources = [f'anabranch_prompt_tokens_total{{source="{name}"}}' for name in ("computed", "dram", "ssd", "peer")]
    before = sum(bench.metric(name) for name in sources)
    generated = bench.metric("anabranch_generated_tokens_total")
    usages = [
        bench.client.chat.completions.create(model="tripwire", messages=LONG, max_tokens=5, n=2).usage for _ in range(3)
    ]
    ok = 'anabranch_requests_total{endpoint="/v1/chat/completions",outcome="ok"}'
    wait_until(lambda: bench.metric("anabranch_requests_running") == 0, "requests did not end")
    assert sum(bench.metric(name) for name in sources) - before == sum(usage.prompt_tokens for usage in usages)
    assert bench.metric("anabranch_generated_tokens_total") - generated == 30
    assert bench.metric(ok) >= 3
    assert bench.metric("anabranch_ttft_seconds_count") >= 3
    assert bench.metric("anabranch_requests_waiting") == 0
    assert bench.metric('anabranch_engines{role="prefill"}') == 1


def test_a_full_queue_answers_429_with_retry_after() -> None:
    with FakeEngine("b", "both") as engine:
        engine.hold()
        config = GatewayConfig(port=0, max_queue=2)
        with running_gateway([engine], config=config) as running:
            body = {"model": "tripwire", "prompt": ["a", "b"], "max_tokens": 2}
            with posting(f"{running.url}/v1/completions", body):
                assert engine.wait(lambda: engine.busy() == 2)
                refused = httpx.post(f"{running.url}/v1/completions", json={**body, "prompt": "c"})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
                engine.hold(False)
            assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200


@contextlib.contextmanager
def posting(url: str, body: dict[str, object]) -> Iterator[None]:
    """POST in the background; at the end it must have succeeded."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(httpx.post, url, json=body, timeout=30.0)
        yield
        assert future.result(30.0).status_code == 200
