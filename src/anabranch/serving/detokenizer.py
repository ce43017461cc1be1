"""Tokens to text, one token at a time.

**Covers** byte-level vocabularies and the stand-in's numbered tokens, as functions of a table. **Does not cover**
reading tokenizer files (`live.tokenizer`).

Promise: the concatenation of everything `push` and `finish` return is the text of all the tokens, however they are
cut, and no returned piece ends inside a character: bytes of an unfinished character are held back, and bytes that
never become one turn into U+FFFD.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    def push(self, token: int) -> str: ...

    def finish(self) -> str:
        """What was held back."""


class ByteDetokenizer:
    """`pieces[token]` are the bytes of a token; tokens in `silent` (special ones) and unknown ids have no text."""

    def __init__(self, pieces: Sequence[bytes], silent: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._silent = silent
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._silent or not 0 <= token < len(self._pieces):
            return ""
        return self._decoder.decode(self._pieces[token])

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


# The stand-in: ids 0…255 are bytes, every other id is written as its number in these brackets.
OPEN, CLOSE = "⟨", "⟩"
NUMBERED = re.compile(f"{OPEN}(0|[1-9][0-9]{{0,9}}){CLOSE}")


def numbered_tokens(text: str, vocab: int) -> list[int]:
    """The inverse of NumberedDetokenizer: its text gives back exactly the tokens it came from."""
    tokens: list[int] = []
    at = 0
    for match in NUMBERED.finditer(text):
        if int(match[1]) < vocab:
            tokens += text[at : match.start()].encode()
            tokens.append(int(match[1]))
            at = match.end()
    tokens += text[at:].encode()
    return tokens


class NumberedDetokenizer:
    """Reversible text for models without a vocabulary: valid UTF-8 among the byte tokens reads as text, and all else
    (other ids, stray bytes, the opening bracket itself) as a number in brackets."""

    def __init__(self) -> None:
        self._bytes = b""

    def push(self, token: int) -> str:
        if not 0 <= token < 256:
            return self.finish() + _numbered(token)
        self._bytes += bytes((token,))
        out = ""
        while self._bytes:
            length = _sequence_bytes(self._bytes[0])
            if len(self._bytes) < length and _continues(self._bytes):
                break
            out += self._take(length)
        return out

    def finish(self) -> str:
        out = "".join(_numbered(byte) for byte in self._bytes)
        self._bytes = b""
        return out

    def _take(self, length: int) -> str:
        """One character, or one stray byte as a number."""
        try:
            text = self._bytes[:length].decode()
        except UnicodeDecodeError:
            text, length = _numbered(self._bytes[0]), 1
        else:
            if text == OPEN:
                text = "".join(_numbered(byte) for byte in self._bytes[:length])
        self._bytes = self._bytes[length:]
        return text


def _numbered(token: int) -> str:
    return f"{OPEN}{token}{CLOSE}"


def _sequence_bytes(lead: int) -> int:
    if lead >= 0xF0:
        return 4
    if lead >= 0xE0:
        return 3
    return 2 if lead >= 0xC0 else 1


def _continues(data: bytes) -> bool:
    """Can more bytes make `data` a character?"""
    try:
        return not codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
