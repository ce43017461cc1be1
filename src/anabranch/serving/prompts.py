"""What a request asks about: chat messages, text prompts, token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from anabranch.core.errors import RequestError
from anabranch.serving.refusals import bad, kind_name, number, type_error

MAX_PROMPTS = 64
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    refusal: str | None = None
    audio: dict[str, Any] | None = None
    function_call: dict[str, Any] | None = None


def check_messages(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Roles and texts as the chat template sees them. Raises RequestError naming the path."""
    if not messages:
        raise RequestError("'messages' is empty; send at least one message", param="messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]


def check_prompts(prompt: str | list[Any], vocab: int) -> list[str | list[int]]:
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(type(item) is int for item in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts or not all(prompts):
        raise bad("prompt", "is empty")
    if len(prompts) > MAX_PROMPTS:
        raise bad("prompt", f"takes at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    checked: list[str | list[int]] = []
    for index, item in enumerate(prompts):
        if isinstance(item, str):
            checked.append(item)
        elif isinstance(item, list):
            checked.append(token_ids(f"prompt[{index}]" if prompts is prompt else "prompt", item, vocab, None))
        else:
            raise RequestError(
                f"prompt[{index}]: expected a string or a list of token ids, got {kind_name(item)}", param="prompt"
            )
    return checked


def token_ids(name: str, ids: list[Any], vocab: int, most: int | None) -> list[int]:
    if most is not None and len(ids) > most:
        raise bad(name, f"takes at most {most} token ids, got {len(ids)}")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            given = number(token) if type(token) is int else kind_name(token)
            raise bad(name, f"must hold token ids from 0 to {vocab - 1}, got {given}")
    return ids


def _message(item: Any, path: str) -> dict[str, str]:
    try:
        message = msgspec.convert(item, Message)
    except msgspec.ValidationError as error:
        raise type_error(error, path) from error
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise RequestError(f"{path}.role: unknown role '{message.role[:40]}'; use one of {known}", param=f"{path}.role")
    for name in ("tool_calls", "audio", "function_call"):
        if getattr(message, name):
            raise RequestError(
                f"{path}.{name} is not supported by this server", param=f"{path}.{name}", code="unsupported_parameter"
            )
    if message.content is None:
        raise RequestError(f"{path}.content is missing or null", param=f"{path}.content")
    result = {"role": ROLES[message.role], "content": _text(message.content, f"{path}.content")}
    if message.name is not None:
        result["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise RequestError(f"{path}.tool_call_id is missing", param=f"{path}.tool_call_id")
        result["tool_call_id"] = message.tool_call_id
    return result


def _text(content: str | list[Any], path: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RequestError(
                f"{where}: only parts of type 'text' are supported, got {str(kind or kind_name(part))[:40]}",
                param=where,
                code="unsupported_parameter",
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.text: expected str, got {kind_name(part.get('text'))}", param=f"{where}.text")
        texts.append(part["text"])
    return "".join(texts)
