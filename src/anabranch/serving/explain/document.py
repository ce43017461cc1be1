"""A prompt as one text whose parts have names.

**Covers** chat request bodies, completion bodies and plain text. **Does not cover** tokens (`parting`).
A chat body is laid out by the model's own template, or, without one, as most templates do (ChatML): tools first, then
messages in order. Offsets inside messages are right either way; token counts then differ by a few.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from anabranch.core.errors import InvalidInput

Render = Callable[[Sequence[Mapping[str, str]]], str]
TEXT_PARTS = ("text", "input_text", "output_text")


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """`text[start:end]` of a document is what the client wrote at `path`, e.g. `messages[0]` with role `system`."""

    path: str
    role: str
    start: int
    end: int


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens`: set if the body itself has token ids; `text` is then empty. `model`: "" if the body names none."""

    name: str
    text: str = ""
    parts: tuple[Part, ...] = ()
    tokens: tuple[int, ...] | None = None
    model: str = ""
    tools: tuple[Any, ...] = ()
    messages: tuple[tuple[str, str], ...] = ()

    def part_at(self, offset: int) -> Part | None:
        """The part that holds this character, else the next one (None behind the last)."""
        return next((part for part in self.parts if offset < part.end), None)


def parse_document(raw: str, name: str, render: Render | None = None) -> Document:
    """A JSON request body, or any other text as it is. Raises InvalidInput naming `name` and the field."""
    if not raw.lstrip().startswith("{") or name.endswith(".txt"):
        return _plain(raw, name)
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as error:
        raise InvalidInput(f"{name}: not valid JSON: {error}; name it .txt to compare it as plain text") from error
    model = body.get("model")
    model = model if isinstance(model, str) else ""
    if "messages" in body:
        return _chat(body, name, model, render)
    if "prompt" in body:
        return _completion(body["prompt"], name, model)
    raise InvalidInput(f"{name}: a request body needs 'messages' or 'prompt'; it has {', '.join(body) or 'nothing'}")


def _plain(text: str, name: str, model: str = "", path: str = "text") -> Document:
    return Document(
        name=name, text=text, model=model, parts=(Part(path=path, role="", start=0, end=len(text)),) if text else ()
    )


def _completion(prompt: object, name: str, model: str) -> Document:
    if isinstance(prompt, str):
        return _plain(prompt, name, model, "prompt")
    if isinstance(prompt, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return Document(name=name, tokens=tuple(prompt), model=model)
    raise InvalidInput(f"{name}: 'prompt' must be a text or a list of token ids")


def _chat(body: Mapping[str, Any], name: str, model: str, render: Render | None) -> Document:
    messages, tools = body["messages"], body.get("tools") or []
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise InvalidInput(f"{name}: 'messages' must be a list with at least one message, and 'tools' a list")
    pairs = [_message(item, f"{name}: messages[{index}]") for index, item in enumerate(messages)]
    prefix = "".join(_json(tool) + "\n" for tool in tools)
    parts = [Part(path="tools", role="tools", start=0, end=len(prefix))] if tools else []
    text = prefix + (render or chatml)([{"role": role, "content": content} for role, content in pairs])
    at = len(prefix)
    for index, (role, content) in enumerate(pairs):
        heading = text.find(role, at)
        start, end = _place(text, content, at if heading < 0 else heading + len(role))
        parts.append(Part(path=f"messages[{index}]", role=role, start=start, end=end))
        at = end
    return Document(name=name, text=text, parts=tuple(parts), model=model, tools=tuple(tools), messages=tuple(pairs))


def chatml(messages: Sequence[Mapping[str, str]]) -> str:
    """The layout of many chat templates, used where the model's own is not at hand."""
    return "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)


def _place(text: str, content: str, at: int) -> tuple[int, int]:
    """Where a template put a message: as it is, stripped, or (rewritten beyond recognition) somewhere from `at` on."""
    for written in (content, content.strip()):
        start = text.find(written, at)
        if start >= 0 and written:
            return start, start + len(written)
    return at, at


def _message(item: object, where: str) -> tuple[str, str]:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise InvalidInput(f"{where} must be an object with a role and a content")
    text = _content(item.get("content"), where)
    if item.get("tool_calls"):
        text += _json(item["tool_calls"])
    return item["role"], text


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(f"{where}: content must be a text or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            texts.append(_json(part))  # an image or a file: any change of it changes the prompt
    return "".join(texts)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
