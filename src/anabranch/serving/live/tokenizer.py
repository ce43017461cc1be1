"""Text ↔ tokens for the served model.

**Covers** a prepared model directory (tokenizer.json, tokenizer_config.json with its chat template) and the stand-in
for models without a vocabulary (tripwire, paced). **See also** `serving.detokenizer` for the way back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as TokenizerFile

from anabranch.core.errors import ConfigError, ModelFileError, RequestError
from anabranch.serving.detokenizer import ByteDetokenizer, Detokenizer, NumberedDetokenizer, numbered_tokens

Messages = Sequence[Mapping[str, str]]


class Tokenizer(Protocol):
    """Thread-safe: long texts are tokenized in a worker thread."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: add what the model expects around a text (a beginning-of-text token, if it has one)."""

    def render(self, messages: Messages) -> str:
        """The chat template's text, ready for the answer. Raises RequestError where the template refuses."""

    def detokenizer(self) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes:
        """The token alone; special tokens by their names; b"" for ids without a token."""


class PreparedTokenizer:
    """The tokenizer of a prepared model directory. Raises ModelFileError if it cannot be used."""

    def __init__(self, directory: Path, now: Callable[[], datetime]) -> None:
        path = directory / "tokenizer.json"
        try:
            data = path.read_text(encoding="utf-8")
            description = json.loads(data)
            # The library raises bare Exception for files it cannot use.
            self._file = TokenizerFile.from_str(data)
        except Exception as error:
            raise ModelFileError(f"cannot use {path}: {error}; prepare the model again") from error
        self._pieces, self._silent = _pieces(self._file.get_vocab(with_added_tokens=True), description)
        self._template = _ChatTemplate(directory, now)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(self._file.encode(text, add_special_tokens=special).ids)

    def render(self, messages: Messages) -> str:
        return self._template.render(messages)

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._pieces, self._silent)

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token] if 0 <= token < len(self._pieces) else b""


class NumberedTokenizer:
    """The stand-in: bytes are tokens 0…255, other ids are written as ⟨number⟩. Needs a vocabulary of 256 or more."""

    def __init__(self, vocab: int) -> None:
        if vocab < 256:
            raise ConfigError(f"a model without a tokenizer needs a vocabulary of at least 256 tokens, not {vocab}")
        self._vocab = vocab

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return numbered_tokens(text, self._vocab)

    def render(self, messages: Messages) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages) + "assistant: "

    def detokenizer(self) -> Detokenizer:
        return NumberedDetokenizer()

    def token_bytes(self, token: int) -> bytes:
        one = NumberedDetokenizer()
        return (one.push(token) + one.finish()).encode()


class _ChatTemplate:
    def __init__(self, directory: Path, now: Callable[[], datetime]) -> None:
        self._now = now
        config = _read_json(directory / "tokenizer_config.json")
        source = config.get("chat_template")
        separate = directory / "chat_template.jinja"
        if separate.exists():
            source = separate.read_text(encoding="utf-8")
        if isinstance(source, list):
            named = {item.get("name"): item.get("template") for item in source if isinstance(item, dict)}
            source = named.get("default")
        names = [name for name in config if name.endswith("_token") and config[name]]
        self._tokens = {name: _content(config[name]) for name in names}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: self._now().strftime(pattern)
        try:
            self._template = environment.from_string(source) if isinstance(source, str) else None
        except TemplateError as error:
            raise ModelFileError(f"the chat template in {directory} is malformed: {error}") from error

    def render(self, messages: Messages) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot use {path}: {error}; prepare the model again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} is not a JSON object; prepare the model again")
    return value


def _pieces(vocab: dict[str, int], description: dict[str, Any]) -> tuple[list[bytes], frozenset[int]]:
    """Bytes of every token, and the ids that are silent in answers."""
    added = {item["id"]: item for item in description.get("added_tokens") or []}
    byte_level = _mentions(description.get("decoder"), "ByteLevel")
    to_byte = {char: value for value, char in enumerate(_byte_characters())}
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)
    for text, token in vocab.items():
        if token in added:
            pieces[token] = added[token]["content"].encode()
        elif byte_level:
            pieces[token] = b"".join(bytes((to_byte[char],)) if char in to_byte else char.encode() for char in text)
        elif len(text) == 6 and text.startswith("<0x"):
            pieces[token] = bytes.fromhex(text[3:5])
        else:
            pieces[token] = text.replace("▁", " ").encode()
    return pieces, frozenset(token for token, item in added.items() if item.get("special"))


def _mentions(decoder: Any, kind: str) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_mentions(part, kind) for part in decoder.get("decoders") or [])


def _byte_characters() -> list[str]:
    """The printable character by which byte-level vocabularies write each byte: itself where Latin-1 prints it, and the
    others, in order, from U+0100 on (Radford et al. 2019, GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]
