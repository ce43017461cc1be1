"""Structured logs on stderr, as text or JSON lines, over the standard library's logging.

`log.info("request done", extra={"request_id": …})`: every extra field appears in the line. Fields of a line: time
(UTC), level, process (as named at `configure`), logger (JSON only), message, then the extra ones.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from anabranch.core.config import LogConfig

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", None, None))) | {
    "message",
    "asctime",
    "taskName",
    "color_message",
}


def configure(config: LogConfig, process: str, *, stream: TextIO | None = None) -> None:
    """Replace the root logger's handlers. `process` names this process in every line (e.g. "prefill-0")."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(process) if config.format == "json" else TextLines(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(config.level.upper())
    for chatty in ("httpx", "httpcore", "asyncio", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextLines(logging.Formatter):
    """`time LEVEL process message key=value …`, tracebacks below."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {self._process:<10} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


def _plain(value: object) -> str:
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(c.isspace() or c in '="' for c in text) else text
