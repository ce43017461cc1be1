"""Structured logs: one line a record, with process and fields, as text or JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from anabranch.core.config import LogConfig
from anabranch.core.live.logging import configure


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_lines_carry_every_field() -> None:
    stream = io.StringIO()
    configure(LogConfig(format="json"), "prefill-0", stream=stream)
    logging.getLogger("anabranch.test").warning("slow %s", "step", extra={"request_id": "r1", "ms": 12})
    line = json.loads(stream.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "process": "prefill-0",
        "logger": "anabranch.test",
        "message": "slow step",
        "request_id": "r1",
        "ms": 12,
    }


def test_a_traceback_stays_in_its_record() -> None:
    stream = io.StringIO()
    configure(LogConfig(format="json"), "p", stream=stream)
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger().exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_text_lines_quote_what_would_be_ambiguous() -> None:
    stream = io.StringIO()
    configure(LogConfig(), "gateway", stream=stream)
    logging.getLogger().info("done", extra={"request_id": "r 1", "tokens": 3})
    logging.getLogger().debug("unseen")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('INFO    gateway    done request_id="r 1" tokens=3')
