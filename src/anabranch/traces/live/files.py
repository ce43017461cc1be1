"""Opening trace files: plain or gzip, and the excerpt that ships with the package."""

from __future__ import annotations

import gzip
import io
from importlib.resources import files
from pathlib import Path
from typing import TextIO, cast

from anabranch.core.errors import InvalidInput
from anabranch.traces.readers import TraceFormat, TraceReader
from anabranch.traces.schema import TraceRequest

EXCERPT = "agent_sessions_excerpt.jsonl"


def read_trace(
    path: str, *, trace_format: TraceFormat | None = None, lenient: bool = False, limit: int | None = None
) -> tuple[list[TraceRequest], TraceReader]:
    """All requests of a file (`""`: of the shipped excerpt), at most `limit`, and the reader, which knows what it
    skipped. Raises InvalidInput: no such file, not a trace, a bad line."""
    name = path or EXCERPT
    reader = TraceReader(name, trace_format=trace_format, lenient=lenient)
    requests: list[TraceRequest] = []
    try:
        with _open(path) as lines:
            for request in reader.requests(lines):
                requests.append(request)
                if limit is not None and len(requests) >= limit:
                    break
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{name}: cannot read the trace: {error}") from error
    return requests, reader


def _open(path: str) -> TextIO:
    if not path:
        return io.StringIO((files("anabranch.traces") / "data" / EXCERPT).read_text(encoding="utf-8"))
    if Path(path).suffix == ".gz":
        return cast(TextIO, gzip.open(path, "rt", encoding="utf-8"))
    return open(path, encoding="utf-8")
