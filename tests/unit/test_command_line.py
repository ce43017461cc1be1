"""The command line's frame: help, unknown commands, exit codes, one line for each error."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from anabranch.cli.errors import run_guarded
from anabranch.cli.main import COMMANDS, cli, load
from anabranch.core.errors import ConfigError, MissingExtra, Unavailable


def failing(error: BaseException) -> click.Command:
    @click.command()
    @click.option("--debug", is_flag=True)
    def command(debug: bool) -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (Unavailable("the node is gone"), 1, ["error: the node is gone"]),
        (ConfigError("a is wrong\nb is wrong"), 2, ["error: a is wrong", "error: b is wrong"]),
        (MissingExtra("engine", "torch"), 2, None),
        (ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn"), 2, None),
        (FileNotFoundError(2, "No such file", "x.json"), 1, ["error: x.json: No such file"]),
        (Unavailable("it ended:\nlast log line"), 1, ["error: it ended:", "last log line"]),
        (KeyboardInterrupt(), 130, ["", "interrupted"]),
        (click.UsageError("no such thing."), 2, ["error: no such thing (see `anabranch --help`)"]),
        (ZeroDivisionError("division by zero"), 1, None),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, lines: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_guarded(failing(error), []) == code
    printed = capsys.readouterr().err.splitlines()
    if lines is not None:
        assert printed == lines
    assert not any("Traceback" in line for line in printed)


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(Unavailable):
        run_guarded(failing(Unavailable("gone")), ["--debug"])


def test_an_unknown_command_is_named_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(cli, ["statsu"]) == 2
    assert "no command 'statsu'; did you mean 'status'?" in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["bench"]])
def test_without_a_command_the_help_is_shown_as_it_is(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(cli, args) == 2
    assert capsys.readouterr().err.startswith("Usage: anabranch")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(cli, ["--help"]) == 0
    text = capsys.readouterr().out
    assert [name for name, entry in COMMANDS.items() if (f"  {name} " in text) == entry.hidden] == []


@pytest.mark.parametrize(
    "name", ["up", "status", "down", "config", "directory", "node", "engine", "gateway", "up-node"]
)
def test_every_page_of_help_has_an_example(name: str) -> None:
    command = load(COMMANDS[name])
    assert "Example" in (command.epilog or "")
    assert command.help


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from anabranch.cli.main import cli; cli.main(['--help'], standalone_mode=False); "
        "heavy = {'torch', 'numpy', 'rich', 'starlette', 'httpx', 'msgspec'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_missing_spec_is_one_line() -> None:
    argv = [sys.executable, "-m", "anabranch", "up-directory", "--spec", "/nonexistent/cluster.json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "error: cannot read the cluster's spec /nonexistent/cluster.json: No such file or directory\n"
    )
