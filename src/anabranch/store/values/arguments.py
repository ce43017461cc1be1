"""What callers of `anabranch.Client` gave, checked before anything is done with it: errors name the argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from anabranch.core.errors import InvalidInput

HIGHEST_PORT = 65_535


def listed(given: Any, name: str) -> Sequence[Any]:
    """A list or tuple as it is, any other iterable as a list. Raises InvalidInput for one key or value instead of
    several."""
    if isinstance(given, list | tuple):
        return given
    if isinstance(given, str | bytes | bytearray | memoryview):
        one = "key" if name == "keys" else "value" if name == "values" else "buffer"
        raise InvalidInput(f"{name} is one {one}; give a list of {name}")
    if not isinstance(given, Iterable):
        raise InvalidInput(f"{name} is a list of {name}, not {type(given).__name__}")
    return list(given)


def text(given: Any, name: str) -> str:
    """Raises InvalidInput for anything but a str that UTF-8 knows."""
    if not isinstance(given, str):
        raise InvalidInput(f"{name} is a str, not {type(given).__name__} ({given!r})")
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{name} {given!r} is not valid Unicode: {error.reason}") from error
    return given


def number(given: Any, name: str, least: int, most: int | None = None) -> int:
    """Raises InvalidInput for anything but an int from `least` to `most`."""
    fits = isinstance(given, int) and not isinstance(given, bool)
    if not fits or given < least or (most is not None and given > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise InvalidInput(f"{name} is a whole number {bounds}, not {given!r}")
    return int(given)


def finite(given: Any, name: str) -> float:
    """Raises InvalidInput for anything but a finite number that is not negative (seconds)."""
    fits = isinstance(given, int | float) and not isinstance(given, bool)
    if not fits or not math.isfinite(given) or given < 0:
        raise InvalidInput(f"{name} is a finite number of seconds from 0 on, not {given!r}")
    return float(given)


def flag(given: Any, name: str) -> bool:
    """Raises InvalidInput for anything but True and False."""
    if not isinstance(given, bool):
        raise InvalidInput(f"{name} is True or False, not {given!r}")
    return given


def addresses_of(given: Iterable[Any], name: str) -> list[str]:
    """Comma-separated addresses: `host:port` (several of one node with `+`) or `unix:/path`. Raises InvalidInput."""
    parts = [part.strip() for one in given for part in text(one, name).split(",")]
    return [_address(part, name) for part in parts if part]


def _address(found: str, name: str) -> str:
    if found.startswith("unix:") and len(found) > len("unix:"):
        return found
    for part in found.split("+"):
        host, _, port = part.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) <= HIGHEST_PORT):
            raise InvalidInput(f"{name} {found!r} is no address: expected host:port, port 1 to {HIGHEST_PORT}")
    return found
