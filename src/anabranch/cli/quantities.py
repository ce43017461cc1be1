"""Bytes as people write and read them."""

from __future__ import annotations

import re

import click

UNITS = {"": 1, "b": 1}
UNITS |= {name: 1000**power for power, name in enumerate(("kb", "mb", "gb", "tb"), 1)}
UNITS |= {name: 1024**power for power, name in enumerate(("kib", "mib", "gib", "tib"), 1)}
UNITS |= {name: 1024**power for power, name in enumerate(("k", "m", "g", "t"), 1)}
WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def byte_count(value: str) -> int:
    """`24GiB`, `24G` (both binary), `24GB` (decimal), or a plain number of bytes. Raises click.BadParameter."""
    match = WRITTEN.fullmatch(value)
    if match is None or match[2].lower() not in UNITS:
        raise click.BadParameter(f"{value!r} is not an amount of bytes; write it like 24GiB, 24GB or 512M")
    return int(float(match[1]) * UNITS[match[2].lower()])


def human_bytes(count: int) -> str:
    """Binary units, at most four significant digits: 1.25 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{count:,} B" if unit == "B" else f"{value:,.4g} {unit}"
        value /= 1024
    return f"{count:,} B"
