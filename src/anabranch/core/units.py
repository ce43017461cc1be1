"""Sizes and durations as people write them. **Covers** parsing and printing; no arithmetic."""

from __future__ import annotations

import re

SIZE_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes of "512MiB", "4GB", "1.5 GiB" or "1048576". Raises ValueError."""
    number, unit = _split(text)
    scale = SIZE_UNITS.get((unit or "b").lower())
    if scale is None:
        raise ValueError(f"unknown size unit {unit!r}; use one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return round(number * scale)


def parse_seconds(text: str) -> float:
    """Seconds of "1.5s", "200ms", "2min" or "0.5". Raises ValueError."""
    number, unit = _split(text)
    scale = TIME_UNITS.get((unit or "s").lower())
    if scale is None:
        raise ValueError(f"unknown time unit {unit!r}; use one of us, ms, s, min, h")
    return number * scale


def format_bytes(count: int) -> str:
    """The shortest exact form when there is one ("512MiB"), else one decimal ("1.4GiB")."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            whole, rest = divmod(count, scale)
            return f"{whole}{unit}" if rest == 0 else f"{count / scale:.1f}{unit}"
    return f"{count}B"


def _split(text: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError("not a number with a unit")
    return float(match.group(1).replace("_", "")), match.group(2)
