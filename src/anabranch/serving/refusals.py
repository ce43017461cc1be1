"""How a wrong request is worded: RequestErrors that name the field, what is wrong, and what would be right."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from anabranch.core.errors import RequestError

N = TypeVar("N", int, float)
T = TypeVar("T")


def within(name: str, value: N, low: N, high: N) -> N:
    if not low <= value <= high:
        raise bad(name, f"must be between {low:g} and {high:g}, got {number(value)}")
    return value


def number(value: int | float) -> str:
    """As a message shows it: JSON allows integers of thousands of digits."""
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if abs(value) < 1 << 64 else "an integer of more than 64 bits"


def bad(name: str, what: str) -> RequestError:
    return RequestError(f"'{name}' {what}", param=name, code="invalid_value")


def decoded(data: bytes, kind: type[T]) -> T:
    """The JSON of a request body. Raises RequestError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise type_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(str(error)) from error
    except RecursionError as error:
        raise _malformed("arrays and objects are nested too deeply") from error


def _malformed(why: str) -> RequestError:
    return RequestError(f"the request body is not valid JSON: {why}", code="invalid_json")


def type_error(error: msgspec.ValidationError, base: str = "") -> RequestError:
    """msgspec words a mismatch as "Expected `a | b`, got `c` - at `$.path`"."""
    what, _, where = str(error).partition(" - at ")
    if where.startswith("`key` in "):
        where = where.removeprefix("`key` in ")
    path = (base + where.strip("`").removeprefix("$")).lstrip(".").replace("[...]", "[]")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        path = f"{path}.{missing[1]}".lstrip(".")
        return RequestError(f"'{path}' is required", param=path, code="missing_required_parameter")
    if unknown := re.fullmatch(r"Object contains unknown field `(.+)`", what):
        path = f"{path}.{unknown[1]}".lstrip(".")
        return RequestError(f"unknown field '{path}'", param=path, code="unknown_parameter")
    what = what.replace("`", "").replace("Expected", "expected").replace(" | null", " or null").replace(" | ", " or ")
    return RequestError(f"{path or 'body'}: {what}", param=path or None, code="invalid_type")


def kind_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
