from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.cli.doctor import doctor


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def test_every_check_is_reported() -> None:
    report = json.loads(CliRunner().invoke(doctor, ["--json", "--port", "0"]).output)
    checks = {check["check"]: check for check in report["checks"]}
    assert {"python", "cpu", "memory", "/dev/shm", "direct I/O", "open files", "extra engine", "port"} <= set(checks)
    assert report["ok"] == all(check["status"] != "fail" for check in report["checks"])
    assert checks["port"]["status"] == "ok"
    assert all(check["remedy"] for check in report["checks"] if check["status"] != "ok")


def test_a_busy_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        result = CliRunner().invoke(doctor, ["--port", port])
    assert result.exit_code == 1
    assert "cannot listen" in result.output.replace("\n", " ")
    assert "to fix" in result.output


def test_a_bad_setting_fails(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[gateway]\nprot = 1\n")
    result = CliRunner().invoke(doctor, ["--config", str(file), "--port", "0"])
    assert result.exit_code == 1
    assert "configuration" in result.output


def test_help_has_examples() -> None:
    assert "anabranch doctor --port 8001 --json" in CliRunner().invoke(doctor, ["--help"]).output
