"""Every bad request body gets the right status, param and code; every good one the right parameters."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from anabranch.core.errors import RequestError
from anabranch.serving.openai import Ask, Limits, SamplingDefaults, parse_chat, parse_completion, parse_tokenize, settle

LIMITS = Limits(model="m", context_tokens=100, vocab=1000, eos_token_ids=(2,), max_n=4)
HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": HI, **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def said(*messages: Any) -> bytes:
    return json.dumps({"model": "m", "messages": list(messages)}).encode()


BAD_CHAT: list[tuple[bytes, int, str | None, str | None]] = [
    (b"{", 400, None, "invalid_json"),
    (b"", 400, None, "invalid_json"),
    (b"\xff\xfe", 400, None, "invalid_json"),
    (b'{"model": "m", "temperature": NaN}', 400, None, "invalid_json"),
    (b"[" * 100_000 + b"]" * 100_000, 400, None, "invalid_json"),
    (b'{"model": "m", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, 400, None, "invalid_json"),
    (b"[1]", 400, None, None),
    (b'{"messages": []}', 400, "model", "missing_required_parameter"),
    (b'{"model": "m"}', 400, "messages", "missing_required_parameter"),
    (chat(model="gpt"), 404, "model", "model_not_found"),
    (chat(model=3), 400, "model", "invalid_type"),
    (chat(messages=[]), 400, "messages", None),
    (chat(messages="hi"), 400, "messages", "invalid_type"),
    (said("hi"), 400, "messages[0]", "invalid_type"),
    (said({"content": "hi"}), 400, "messages[0].role", "missing_required_parameter"),
    (said(HI[0], {"role": "robot", "content": "x"}), 400, "messages[1].role", None),
    (said({"role": "user", "content": None}), 400, "messages[0].content", None),
    (said({"role": "user"}), 400, "messages[0].content", None),
    (said({"role": "user", "content": 3}), 400, "messages[0].content", "invalid_type"),
    (said({"role": "user", "content": ["x"]}), 400, "messages[0].content[0]", "unsupported_parameter"),
    (
        said({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        400,
        "messages[0].content[0]",
        "unsupported_parameter",
    ),
    (said({"role": "user", "content": [{"type": "text"}]}), 400, "messages[0].content[0].text", None),
    (said({"role": "tool", "content": "x"}), 400, "messages[0].tool_call_id", None),
    (
        said({"role": "assistant", "content": "x", "tool_calls": [{}]}),
        400,
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
    (chat(max_tokens=0), 400, "max_tokens", "invalid_value"),
    (chat(max_tokens=-5), 400, "max_tokens", "invalid_value"),
    (chat(max_tokens="5"), 400, "max_tokens", "invalid_type"),
    (chat(max_tokens=1.5), 400, "max_tokens", "invalid_type"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens", "invalid_value"),
    (chat(max_tokens=3, max_completion_tokens=4), 400, "max_tokens", "invalid_value"),
    (chat(temperature=-0.1), 400, "temperature", "invalid_value"),
    (chat(temperature=2.1), 400, "temperature", "invalid_value"),
    (b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, None, None),
    (chat(temperature="hot"), 400, "temperature", "invalid_type"),
    (chat(temperature=True), 400, "temperature", "invalid_type"),
    (chat(top_p=0), 400, "top_p", "invalid_value"),
    (chat(top_p=1.1), 400, "top_p", "invalid_value"),
    (chat(top_k=-2), 400, "top_k", "invalid_value"),
    (chat(top_k=1001), 400, "top_k", "invalid_value"),
    (chat(min_p=1.5), 400, "min_p", "invalid_value"),
    (chat(n=0), 400, "n", "invalid_value"),
    (chat(n=5), 400, "n", "invalid_value"),
    (chat(seed=1 << 63), 400, "seed", None),
    (chat(seed="x"), 400, "seed", "invalid_type"),
    (chat(presence_penalty=3), 400, "presence_penalty", "invalid_value"),
    (chat(frequency_penalty=-3), 400, "frequency_penalty", "invalid_value"),
    (chat(repetition_penalty=0), 400, "repetition_penalty", "invalid_value"),
    (chat(logprobs=3), 400, "logprobs", "invalid_type"),
    (chat(top_logprobs=3), 400, "top_logprobs", "invalid_value"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "invalid_value"),
    (chat(logprobs=True, top_logprobs=-1), 400, "top_logprobs", "invalid_value"),
    (chat(stop=["a", "b", "c", "d", "e"]), 400, "stop", "invalid_value"),
    (chat(stop=""), 400, "stop", "invalid_value"),
    (chat(stop=["a", ""]), 400, "stop", "invalid_value"),
    (chat(stop=[1]), 400, "stop[0]", "invalid_type"),
    (chat(stop_token_ids=[1000]), 400, "stop_token_ids", "invalid_value"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids", "invalid_value"),
    (chat(logit_bias={"x": 1}), 400, "logit_bias", "invalid_value"),
    (chat(logit_bias={"1000": 1}), 400, "logit_bias", "invalid_value"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias", "invalid_value"),
    (chat(logit_bias={"5": "x"}), 400, "logit_bias[]", "invalid_type"),
    (chat(min_tokens=-1), 400, "min_tokens", "invalid_value"),
    (chat(max_tokens=4, min_tokens=5), 400, "min_tokens", "invalid_value"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", "invalid_value"),
    (chat(stream=True, stream_options={"include_usage": 1}), 400, "stream_options.include_usage", "invalid_type"),
    (chat(stream="yes"), 400, "stream", "invalid_type"),
    (chat(tools=[{"type": "function"}]), 400, "tools", "unsupported_parameter"),
    (chat(tool_choice="required"), 400, "tool_choice", "unsupported_parameter"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format", "unsupported_parameter"),
    (chat(modalities=["text", "audio"]), 400, "modalities", "unsupported_parameter"),
    (chat(audio={"voice": "x"}), 400, "audio", "unsupported_parameter"),
    (chat(skip_special_tokens=False), 400, "skip_special_tokens", "unsupported_parameter"),
    (chat(temprature=1), 400, "temprature", "unknown_parameter"),
    (chat(prompt="x"), 400, "prompt", "unknown_parameter"),
]

BAD_COMPLETION: list[tuple[bytes, str | None, str | None]] = [
    (completion(prompt=""), "prompt", "invalid_value"),
    (completion(prompt=[]), "prompt", "invalid_value"),
    (completion(prompt=["a", ""]), "prompt", "invalid_value"),
    (completion(prompt=[[]]), "prompt", "invalid_value"),
    (completion(prompt=3), "prompt", "invalid_type"),
    (completion(prompt=[1, 1000]), "prompt", "invalid_value"),
    (completion(prompt=[1, -1]), "prompt", "invalid_value"),
    (completion(prompt=[1, 10**400]), "prompt", "invalid_value"),
    (b'{"model": "m", "prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt[0]", "invalid_value"),
    (completion(prompt=[[1], [2, 1000]]), "prompt[1]", "invalid_value"),
    (completion(prompt=["a", None]), "prompt", "invalid_value"),
    (completion(prompt=["a", {"x": 1}]), "prompt", None),
    (completion(prompt=["x"] * 65), "prompt", "invalid_value"),
    (completion(logprobs=21), "logprobs", "invalid_value"),
    (completion(logprobs=True), "logprobs", "invalid_type"),
    (completion(echo=True), "echo", "unsupported_parameter"),
    (completion(best_of=2), "best_of", "unsupported_parameter"),
    (completion(best_of=True), "best_of", "unsupported_parameter"),
    (completion(suffix="x"), "suffix", "unsupported_parameter"),
    (completion(messages=HI), "messages", "unknown_parameter"),
    (completion(max_tokens=0), "max_tokens", "invalid_value"),
]


@pytest.mark.parametrize(("body", "status", "param", "code"), BAD_CHAT)
def test_a_bad_chat_body_is_refused(body: bytes, status: int, param: str | None, code: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_chat(body, LIMITS)
    assert caught.value.status == status
    if param is not None:
        assert caught.value.param == param
        assert param.rpartition(".")[2].partition("[")[0] in str(caught.value)
    if code is not None:
        assert caught.value.code == code


@pytest.mark.parametrize("digits", [20, 400, 4299, 5000])
@pytest.mark.parametrize(
    "field", ["n", "max_tokens", "min_tokens", "top_k", "top_logprobs", "seed", "temperature", "length_penalty"]
)
def test_numbers_of_any_length_are_refused(field: str, digits: int) -> None:
    """Integers that no float and no 64 bits hold."""
    for sign in (b"", b"-"):
        body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": true, "%s": %s}'
        with pytest.raises(RequestError) as caught:
            settle(parse_chat(body % (field.encode(), sign + b"9" * digits), LIMITS), 10, LIMITS, 1)
        assert caught.value.status == 400
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("body", "param", "code"), BAD_COMPLETION)
def test_a_bad_completion_body_is_refused(body: bytes, param: str | None, code: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_completion(body, LIMITS)
    assert caught.value.status == 400
    assert caught.value.param == param
    if code is not None:
        assert caught.value.code == code


def test_an_unknown_field_names_the_nearest_valid_one() -> None:
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        parse_chat(chat(temprature=1), LIMITS)


def test_neutral_and_ignored_fields_are_accepted() -> None:
    ask = parse_chat(
        chat(
            user="u",
            metadata={"a": "b"},
            store=True,
            tools=[],
            tool_choice="auto",
            response_format={"type": "text"},
            audio=None,
            n=None,
            stop=None,
            temperature=None,
            stream=None,
        ),
        LIMITS,
    )
    assert ask.n == 1
    assert ask.sampling.temperature == 1.0


def test_roles_and_text_parts() -> None:
    ask = parse_chat(
        said(
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {"role": "assistant", "content": "", "tool_calls": []},
            {"role": "tool", "content": "42", "tool_call_id": "t"},
        ),
        LIMITS,
    )
    assert ask.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab", "name": "x"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42", "tool_call_id": "t"},
    ]


def test_sampling_parameters_arrive() -> None:
    body = chat(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        stop=["x", "y", "x"],
        stop_token_ids=[7],
        logit_bias={"5": -100},
        logprobs=True,
        n=3,
        max_completion_tokens=9,
        min_tokens=2,
        repetition_penalty=1.1,
    )
    ask = parse_chat(body, LIMITS)
    sampling = settle(ask, 10, LIMITS, random_seed=123)
    assert ask.stop == ("x", "y")
    assert ask.n == 3
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert sampling.seed == (1 << 63) - 1
    assert sampling.stop_token_ids == (2, 7)
    assert sampling.logit_bias == {5: -100}
    assert (sampling.logprobs, sampling.max_tokens, sampling.min_tokens) == (0, 9, 2)
    assert sampling.repetition_penalty == 1.1


def test_end_of_text_stops_unless_ignored() -> None:
    assert parse_chat(chat(), LIMITS).sampling.stop_token_ids == (2,)
    assert parse_chat(chat(ignore_eos=True), LIMITS).sampling.stop_token_ids == ()


def test_prompts_of_a_completion() -> None:
    def prompts(value: Any) -> list[str | list[int]]:
        return parse_completion(completion(prompt=value), LIMITS).prompts

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2]]) == [[1], [2]]
    assert parse_completion(completion(), LIMITS).max_tokens == 16


def settled(ask: Ask, prompt_tokens: int) -> int:
    return settle(ask, prompt_tokens, LIMITS, random_seed=5).max_tokens


def test_prompt_and_answer_must_fit_the_context() -> None:
    assert settled(parse_chat(chat(), LIMITS), 40) == 60
    assert settled(parse_chat(chat(max_tokens=60), LIMITS), 40) == 60
    for ask, tokens in ((parse_chat(chat(max_tokens=61), LIMITS), 40), (parse_chat(chat(), LIMITS), 100)):
        with pytest.raises(RequestError, match="maximum context length is 100") as caught:
            settled(ask, tokens)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


def test_the_model_s_recommendation_applies_where_a_request_says_nothing() -> None:
    defaults = SamplingDefaults(temperature=0.2, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1)
    limits = msgspec.structs.replace(LIMITS, defaults=defaults)

    def five(**body: Any) -> tuple[float, ...]:
        said = parse_chat(chat(**body), limits).sampling
        return (said.temperature, said.top_p, said.top_k, said.min_p, said.repetition_penalty)

    assert five() == (0.2, 0.9, 40, 0.1, 1.1)
    neutral = (1.0, 1.0, 0, 0.0, 1.0)
    assert five(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1) == neutral
    assert five(temperature=0)[0] == 0.0


def test_seeds_are_random_unless_given() -> None:
    assert settle(parse_chat(chat(), LIMITS), 1, LIMITS, random_seed=77).seed == 77
    assert settle(parse_chat(chat(seed=0), LIMITS), 1, LIMITS, random_seed=77).seed == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "messages": HI}, "text"),
        ({"text": 3}, "text"),
        ({"texts": "a"}, "texts"),
        ({"text": "a", "model": "gpt"}, "model"),
    ],
)
def test_tokenize_wants_text_or_messages(body: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tokenize(json.dumps(body).encode(), LIMITS)
    assert caught.value.param == param
