from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("httpx")

from anabranch.cli.bench import bench
from anabranch.core.errors import ConfigError, InvalidInput, Unavailable
from anabranch.testing.fake_endpoint import FakeEndpoint


def run(endpoint: FakeEndpoint, *more: str) -> Result:
    return CliRunner().invoke(bench, ["serve", "--url", endpoint.url, "--max-tokens", "3", "--seed", "5", *more])


def test_sessions_are_replayed_and_a_perfect_cache_is_ideal(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with FakeEndpoint(context=400) as endpoint:
        result = run(endpoint, "--sessions", "3", "--turns", "4", "--json", str(file))
    assert result.exit_code == 0, result.output
    for words in ("TTFT", "later turns", "TPOT", "% reused", "ideal", "tokens/s"):
        assert words in result.output
    report = json.loads(file.read_text())
    summary = report["summary"]
    assert (summary["turns"], summary["failed"], report["complete"]) == (12, 0, True)
    assert summary["cached_share"] == pytest.approx(summary["ideal_share"])
    assert summary["ideal_share"] > 0.3
    assert (summary["short_turns"], summary["worst_missed_blocks"]) == (0, 0)
    assert summary["tiers"]["dram"] == sum(turn["cached_tokens"] for turn in report["turns"])
    assert not (tmp_path / "result.json.part").exists()
    for body in endpoint.requests:
        assert len(body["prompt"]) + 3 <= 400
        assert all(1000 <= token < 30000 for token in body["prompt"])
    by_session: dict[str, list[dict[str, Any]]] = {}
    for turn in report["turns"]:
        by_session.setdefault(turn["session"], []).append(turn)
    assert all([turn["turn"] for turn in turns] == [0, 1, 2, 3] for turns in by_session.values())


def test_the_same_seed_sends_the_same_prompts_and_finds_them_again() -> None:
    with FakeEndpoint() as endpoint:
        run(endpoint, "--sessions", "1", "--turns", "2")
        second = run(endpoint, "--sessions", "1", "--turns", "2", "--json", "-")
    prompts = [body["prompt"] for body in endpoint.requests]
    assert prompts[:2] == prompts[2:]
    assert json.loads(second.output)["summary"]["missed_blocks"]["mean"] < 0


def test_context_and_tiers_the_server_does_not_tell() -> None:
    with FakeEndpoint(context=None, tiers=False) as endpoint:
        result = run(endpoint, "--sessions", "1", "--turns", "2", "--context", "100", "--json", "-")
    report = json.loads(result.output)
    assert report["context"] == 100
    assert report["summary"]["cached_share"] > 0
    assert report["summary"]["tiers"] == {"dram": 0, "ssd": 0, "peer": 0}


def test_a_busy_server_is_asked_again_and_a_refusal_is_reported() -> None:
    with FakeEndpoint(before=lambda number, body: {0: 429, 2: 400}.get(number)) as endpoint:
        result = run(endpoint, "--sessions", "1", "--turns", "3", "--concurrency", "1")
    assert result.exit_code == 1
    assert "1 failed: refused: refused with 400" in result.output
    assert len(endpoint.requests) == 4


def test_a_server_that_dies_stops_the_run_but_not_the_report(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    with FakeEndpoint(before=lambda number, body: "drop" if number == 2 else None) as endpoint:
        result = run(endpoint, "--sessions", "4", "--turns", "4", "--concurrency", "1", "--json", str(file))
    assert result.exit_code == 1
    assert "stopped after 3 of 16" in result.output
    assert "1 failed: unavailable" in result.output
    assert json.loads(file.read_text())["summary"]["turns"] == 2


@pytest.mark.parametrize("number_of_signal", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_reports_what_it_has(tmp_path: Path, number_of_signal: int) -> None:
    released = threading.Event()

    def interrupt(number: int, body: dict[str, Any]) -> str | None:
        if number < 3:
            return None
        os.kill(os.getpid(), number_of_signal)
        released.wait(30)
        return "drop"

    file = tmp_path / "r.json"
    with FakeEndpoint(before=interrupt) as endpoint:
        try:
            result = run(endpoint, "--turns", "4", "--concurrency", "1", "--json", str(file))
        finally:
            released.set()
    assert result.exit_code == 130
    assert "stopped after 3 of" in result.output
    report = json.loads(file.read_text())
    assert (report["complete"], report["summary"]["turns"]) == (False, 3)


def test_results_are_kept_turn_by_turn(tmp_path: Path) -> None:
    file, kept = tmp_path / "r.json", []
    part = tmp_path / "r.json.part"

    def look(number: int, body: dict[str, Any]) -> None:
        kept.append(len(part.read_bytes().splitlines()))

    with FakeEndpoint(before=look) as endpoint:
        run(endpoint, "--sessions", "1", "--turns", "3", "--json", str(file))
    assert kept == [0, 1, 2]


def test_errors_are_one_line(tmp_path: Path) -> None:
    with FakeEndpoint() as endpoint:
        assert isinstance(run(endpoint, "--model", "other").exception, ConfigError)
        assert "it serves: fake" in str(run(endpoint, "--model", "other").exception)
        azure = tmp_path / "azure.csv"
        azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n")
        assert "no block ids" in str(run(endpoint, "--trace", str(azure)).exception)
        assert "no room" in str(run(endpoint, "--context", "16", "--max-tokens", "16").exception)
        assert isinstance(run(endpoint, "--json", str(tmp_path / "no" / "r.json")).exception, InvalidInput)
        bad = tmp_path / "bad.jsonl"
        bad.write_text("nonsense")
        assert "bad.jsonl:1:" in str(run(endpoint, "--trace", str(bad)).exception)
        result = run(endpoint, "--token-range", "9:3")
        assert result.exit_code == 2
        assert "write it like 1000:30000" in result.output
    gone = run(endpoint)
    assert isinstance(gone.exception, Unavailable)
    assert "anabranch up" in str(gone.exception)


def test_help_has_examples() -> None:
    assert "anabranch bench serve --sessions 4" in CliRunner().invoke(bench, ["--help"]).output
    assert "--json result.json" in CliRunner().invoke(bench, ["serve", "--help"]).output
