"""OpenAI request bodies: parsing and validation.

**Covers** turning the bytes of a chat or completions request into an `Ask`, or into a RequestError with the status,
`param` and `code` that OpenAI's API uses. **Does not cover** tokenizing (`live.tokenizer`) or answers (`answers`).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from anabranch.core.errors import RequestError
from anabranch.engine.request import SamplingParams
from anabranch.serving.fields import NEUTRAL_CHAT, NEUTRAL_COMPLETION, check_fields
from anabranch.serving.prompts import check_messages, check_prompts, token_ids
from anabranch.serving.refusals import bad, decoded, number, type_error, within

MAX_STOPS = 4
MAX_STOP_CHARS = 1000
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LOGPROBS = 20
SEED_SPAN = 1 << 63


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What applies where a request says nothing: the recommendation of the model's authors (`generation_config.json`,
    whose other fields are not about sampling)."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the served model and the gateway allow. `model` is the one name requests must use."""

    model: str
    context_tokens: int
    vocab: int
    eos_token_ids: tuple[int, ...] = ()
    max_n: int = 16
    defaults: SamplingDefaults = SamplingDefaults()


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """Fields that both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None


class ChatBody(Body, kw_only=True):
    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class CompletionBody(Body, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    text: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None


class Ask(msgspec.Struct, kw_only=True):
    """A valid request, before its prompt is tokenized.

    Exactly one of `messages` (chat) and `prompts` (completions, each text or token ids) is filled. `sampling` lacks
    what depends on the prompt and on chance (`settle` fills it in).
    """

    kind: Literal["chat", "completion"]
    model: str
    messages: list[dict[str, str]] = []
    prompts: list[str | list[int]] = []
    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


B = TypeVar("B", bound=msgspec.Struct)


def parse_chat(data: bytes, limits: Limits) -> Ask:
    """Raises RequestError."""
    body = _decode(data, ChatBody, NEUTRAL_CHAT)
    _check_model(body.model, limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs to be true")
    logprobs = within("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS) if body.logprobs else None
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise bad("max_tokens", "and max_completion_tokens differ; send only max_completion_tokens")
    max_tokens, name = body.max_tokens, "max_tokens"
    if max_tokens is None:
        max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
    ask = _ask("chat", body, limits, logprobs, max_tokens, name)
    ask.messages = check_messages(body.messages)
    return ask


def parse_completion(data: bytes, limits: Limits) -> Ask:
    """Raises RequestError."""
    body = _decode(data, CompletionBody, NEUTRAL_COMPLETION)
    _check_model(body.model, limits)
    logprobs = None if body.logprobs is None else within("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    ask = _ask("completion", body, limits, logprobs, max_tokens, "max_tokens")
    ask.prompts = check_prompts(body.prompt, limits.vocab)
    return ask


def parse_tokenize(data: bytes, limits: Limits) -> TokenizeBody:
    """Raises RequestError. Exactly one of `text` and `messages` is set."""
    body = decoded(data, TokenizeBody)
    if body.model is not None:
        _check_model(body.model, limits)
    if (body.text is None) == (body.messages is None):
        raise RequestError("send either 'text' or 'messages'", param="text")
    return body


def settle(ask: Ask, prompt_tokens: int, limits: Limits, random_seed: int) -> SamplingParams:
    """The sampling parameters of one prompt. Raises RequestError if prompt and answer do not fit the context."""
    room = limits.context_tokens - prompt_tokens
    if prompt_tokens < 1:
        raise RequestError("the prompt is empty", param="messages" if ask.kind == "chat" else "prompt")
    wanted = ask.max_tokens if ask.max_tokens is not None else max(room, 1)
    if wanted > room:
        raise RequestError(
            f"this model's maximum context length is {limits.context_tokens} tokens, but"
            f" {number(prompt_tokens + wanted)} were requested ({prompt_tokens} in the prompt, {number(wanted)} for the"
            f" answer); shorten one of them",
            param="messages" if ask.kind == "chat" else "prompt",
            code="context_length_exceeded",
        )
    seed = ask.seed if ask.seed is not None else random_seed
    min_tokens = min(ask.sampling.min_tokens, wanted)
    return msgspec.structs.replace(ask.sampling, max_tokens=wanted, min_tokens=min_tokens, seed=seed % SEED_SPAN)


def _decode(data: bytes, kind: type[B], neutral: dict[str, tuple[Any, ...]]) -> B:
    fields = decoded(data, object)
    if not isinstance(fields, dict):
        raise RequestError("the request body must be a JSON object")
    check_fields(fields, kind.__struct_fields__, neutral)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise type_error(error) from error


def _ask(
    kind: Literal["chat", "completion"],
    body: Body,
    limits: Limits,
    logprobs: int | None,
    max_tokens: int | None,
    name: str,
) -> Ask:
    if max_tokens is not None and max_tokens < 1:
        raise bad(name, f"must be at least 1, got {number(max_tokens)}")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options", "is only allowed when stream is true")
    if body.seed is not None and not -SEED_SPAN <= body.seed < SEED_SPAN:
        raise bad("seed", "must fit into 64 bits")
    return Ask(
        kind=kind,
        model=body.model,
        sampling=_sampling(body, limits, logprobs, max_tokens),
        max_tokens=max_tokens,
        seed=body.seed,
        n=within("n", 1 if body.n is None else body.n, 1, limits.max_n),
        stop=_stops(body.stop),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
    )


def _sampling(body: Body, limits: Limits, logprobs: int | None, max_tokens: int | None) -> SamplingParams:
    defaults = limits.defaults
    top_p = defaults.top_p if body.top_p is None else body.top_p
    penalty = defaults.repetition_penalty if body.repetition_penalty is None else body.repetition_penalty
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_k = min(defaults.top_k, limits.vocab) if body.top_k is None else body.top_k
    min_p = defaults.min_p if body.min_p is None else body.min_p
    if not 0.0 < top_p <= 1.0:
        raise bad("top_p", f"must be above 0 and at most 1, got {top_p:g}")
    if not 0.0 < penalty <= 10.0:
        raise bad("repetition_penalty", f"must be above 0 and at most 10, got {penalty:g}")
    ids = token_ids("stop_token_ids", body.stop_token_ids or [], limits.vocab, MAX_STOP_IDS)
    eos = () if body.ignore_eos else limits.eos_token_ids
    highest = limits.context_tokens if max_tokens is None else max_tokens
    return SamplingParams(
        temperature=within("temperature", temperature, 0.0, 2.0),
        top_p=top_p,
        top_k=max(0, within("top_k", top_k, -1, limits.vocab)),
        min_p=within("min_p", min_p, 0.0, 1.0),
        min_tokens=within("min_tokens", body.min_tokens or 0, 0, highest),
        stop_token_ids=tuple(dict.fromkeys((*eos, *ids))),
        repetition_penalty=penalty,
        presence_penalty=within("presence_penalty", body.presence_penalty or 0.0, -2.0, 2.0),
        frequency_penalty=within("frequency_penalty", body.frequency_penalty or 0.0, -2.0, 2.0),
        logit_bias=_biases(body.logit_bias or {}, limits.vocab),
        logprobs=logprobs,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise bad("stop", f"takes at most {MAX_STOPS} strings, got {len(stops)}")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise bad("stop", f"strings must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(stops))


def _biases(biases: dict[str, float], vocab: int) -> dict[int, float]:
    if len(biases) > MAX_BIASES:
        raise bad("logit_bias", f"takes at most {MAX_BIASES} tokens, got {len(biases)}")
    checked: dict[int, float] = {}
    for key, value in biases.items():
        if not re.fullmatch(r"[0-9]{1,9}", key) or int(key) >= vocab:
            raise bad("logit_bias", f"keys must be token ids below {vocab}, got {key!r}")
        if not -100.0 <= value <= 100.0:
            raise bad("logit_bias", f"values must be between -100 and 100, got {value:g} for token {key}")
        checked[int(key)] = value
    return checked


def _check_model(name: str, limits: Limits) -> None:
    if name != limits.model:
        raise RequestError(
            f"the model '{name[:100]}' does not exist; this server serves '{limits.model}'",
            status=404,
            param="model",
            code="model_not_found",
        )
