from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("httpx")

from anabranch.cli.chat import chat
from anabranch.core.errors import RequestError, Unavailable
from anabranch.testing.fake_endpoint import FakeEndpoint


def talk(endpoint: FakeEndpoint, text: str, *more: str) -> Result:
    return CliRunner().invoke(chat, ["--url", endpoint.url, "--max-tokens", "2", *more], input=text)


def test_piped_turns_go_on_from_each_other() -> None:
    with FakeEndpoint() as endpoint:
        result = talk(endpoint, "Hello\n\nAnd now?\n/stats\n", "--system", "Be brief.")
    assert result.exit_code == 0, result.output
    assert "word word" in result.output
    assert "reused 0 · computed" in result.output
    assert " dram) · computed" in result.output
    assert "TTFT" in result.output
    assert "2 turns · prompts" in result.output
    first, second = (body["messages"] for body in endpoint.requests)
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[: len(first)] == first
    assert second[2]["content"] == "word word "
    assert endpoint.requests[0]["stream_options"] == {"include_usage": True}


def test_commands(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    with FakeEndpoint() as endpoint:
        lines = ["One", f"/save {file}", "/reset", "Two", "/what", "/save", "/exit", "Never asked"]
        result = talk(endpoint, "\n".join(lines))
    assert result.exit_code == 0, result.output
    assert len(endpoint.requests) == 2
    assert len(endpoint.requests[1]["messages"]) == 1
    assert "no command /what" in result.output
    assert "write /save FILE" in result.output
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"]


def test_json() -> None:
    with FakeEndpoint() as endpoint:
        result = talk(endpoint, "Hello\nAgain\n", "--json")
    turns = [json.loads(line) for line in result.stdout.splitlines()]
    assert [turn["user"] for turn in turns] == ["Hello", "Again"]
    assert turns[0]["answer"]["output_tokens"] == 2
    assert turns[0]["answer"]["prompt_tokens"] > 0


def test_a_busy_server_is_asked_again_and_refusals_and_breaks_are_errors() -> None:
    with FakeEndpoint(before=lambda number, body: 429 if number == 0 else None) as endpoint:
        assert talk(endpoint, "Hello\n").exit_code == 0
    with FakeEndpoint(before=lambda number, body: 400) as endpoint:
        refused = talk(endpoint, "Hello\n").exception
        assert isinstance(refused, RequestError)
        assert str(refused) == "refused with 400"
    with FakeEndpoint(before=lambda number, body: "drop") as endpoint:
        assert isinstance(talk(endpoint, "Hello\n").exception, Unavailable)


def test_no_server_says_what_to_do() -> None:
    with FakeEndpoint() as endpoint:
        pass
    error = talk(endpoint, "Hello\n").exception
    assert isinstance(error, Unavailable)
    assert "anabranch up" in str(error)


def test_in_a_terminal_ctrl_c_stops_the_answer_and_not_the_chat() -> None:
    asked, released = threading.Event(), threading.Event()

    def hold(number: int, body: dict[str, Any]) -> str | None:
        if number > 0:
            return None
        asked.set()
        released.wait(60)
        return "drop"

    parent, child = pty.openpty()
    command = [sys.executable, "-c", "from anabranch.cli.chat import chat; chat()", "--max-tokens", "2"]
    with FakeEndpoint(before=hold) as endpoint:
        process = subprocess.Popen([*command, "--url", endpoint.url], stdin=child, stdout=child, stderr=child)
        os.close(child)
        try:
            read_until(parent, "> ")
            os.write(parent, b"first\n")
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            read_until(parent, "this turn is forgotten")
            os.write(parent, b"second\n")
            read_until(parent, "TTFT")
            os.write(parent, b"/exit\n")
            assert process.wait(60) == 0
        finally:
            released.set()
            process.kill()
            process.wait()
            os.close(parent)
    assert [message["content"] for message in endpoint.requests[1]["messages"]] == ["second"]


def read_until(terminal: int, words: str) -> None:
    seen, deadline = "", time.monotonic() + 60
    while words not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{words!r} did not come; seen: {seen!r}"
        seen += os.read(terminal, 4096).decode()


def test_help_has_examples() -> None:
    assert "| anabranch chat" in CliRunner().invoke(chat, ["--help"]).output
