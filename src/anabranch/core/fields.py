"""One setting: its type, the conversion of what a source says into it, and how it is shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import msgspec

from anabranch.core.units import format_bytes, parse_bytes, parse_seconds

SECRET_SUFFIXES = ("_secret", "_token", "_password")


def field_of(struct: type[msgspec.Struct], key: str) -> msgspec.inspect.Field:
    info = msgspec.inspect.type_info(struct)
    if not isinstance(info, msgspec.inspect.StructType):
        raise TypeError(f"{struct.__name__} is not a struct")
    return next(field for field in info.fields if field.name == key)


def kind_of(field: msgspec.inspect.Field) -> tuple[msgspec.inspect.Type, str]:
    """The type without its metadata, and its description."""
    kind = field.type
    if isinstance(kind, msgspec.inspect.Metadata):
        return kind.type, str((kind.extra_json_schema or {}).get("description", ""))
    return kind, ""


def convert(field: msgspec.inspect.Field, value: Any) -> Any:
    """A value of the field's type: text is parsed, typed values are checked. Raises ValueError naming the expected."""
    kind, meta = kind_of(field)
    match kind:
        case msgspec.inspect.LiteralType(values=allowed):
            return _literal(allowed, value)
        case msgspec.inspect.BoolType():
            return _boolean(value)
        case msgspec.inspect.IntType():
            return _in_range(_integer(field.name, value), kind)
        case msgspec.inspect.FloatType():
            return _in_range(_number(field.name, value), kind)
        case msgspec.inspect.StrType():
            if not isinstance(value, str):
                raise ValueError(f"expected text, got {_type_name(value)}")
            return value
    raise TypeError(f"{field.name}: {kind} cannot be configured ({meta})")


def mask(key: str, value: Any) -> Any:
    """The value, or stars if its key says that it is a secret."""
    return "********" if key.endswith(SECRET_SUFFIXES) and value else value


def show(key: str, value: Any) -> str:
    """A value as a person would write it; secrets are masked."""
    value = mask(key, value)
    if key.endswith("_bytes") and isinstance(value, int):
        return format_bytes(value)
    if key.endswith("_s") and isinstance(value, float):
        return f"{value:g}s"
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def expected(key: str, kind: msgspec.inspect.Type | None, number: str = "") -> str:
    if key.endswith("_bytes"):
        return "a size such as 512MiB or 4GB"
    if key.endswith("_s"):
        return "a duration such as 1.5s or 200ms"
    if number:
        return number
    match kind:
        case msgspec.inspect.LiteralType(values=values):
            return " \\| ".join(f"`{value}`" for value in values)
        case msgspec.inspect.IntType():
            return "integer"
        case msgspec.inspect.FloatType():
            return "number"
        case msgspec.inspect.BoolType():
            return "true \\| false"
    return "text"


def quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _literal(allowed: Iterable[Any], value: Any) -> Any:
    choices = list(allowed)
    if value in choices:
        return value
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ValueError(f"expected one of {', '.join(map(str, choices))}{hint}")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = value.lower() if isinstance(value, str) else ""
    if text in ("true", "yes", "on", "1"):
        return True
    if text in ("false", "no", "off", "0"):
        return False
    raise ValueError("expected true or false")


def _integer(key: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    wanted = expected(key, None, number="an integer")
    if not isinstance(value, str):
        raise ValueError(f"expected {wanted}, got {_type_name(value)}")
    try:
        return parse_bytes(value) if key.endswith("_bytes") and not _signed(value) else int(value)
    except ValueError as error:
        raise ValueError(f"expected {wanted}" + _unit_hint(error)) from error


def _number(key: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    wanted = expected(key, None, number="a number")
    if not isinstance(value, str):
        raise ValueError(f"expected {wanted}, got {_type_name(value)}")
    try:
        return parse_seconds(value) if key.endswith("_s") and not _signed(value) else float(value)
    except ValueError as error:
        raise ValueError(f"expected {wanted}" + _unit_hint(error)) from error


def _signed(text: str) -> bool:
    return text.strip().startswith(("-", "+"))


def _unit_hint(error: ValueError) -> str:
    return f" ({error})" if "unit" in str(error) and "unknown" in str(error) else ""


def _in_range(value: Any, kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> Any:
    """No setting is negative unless its annotation says so."""
    least = kind.ge if kind.ge is not None else (0 if kind.gt is None else None)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("expected a finite number")
    if least is not None and value < least:
        raise ValueError(f"must be at least {least}")
    if kind.gt is not None and value <= kind.gt:
        raise ValueError(f"must be greater than {kind.gt}")
    if kind.le is not None and value > kind.le:
        raise ValueError(f"must be at most {kind.le}")
    return value


def _type_name(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)
