"""The `anabranch` command: a table of commands, each imported only when it is used.

`anabranch --help` and `anabranch config` work with the bare core; a command that needs an optional extra fails with
MissingExtra's one line.
"""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import click

from anabranch import __version__
from anabranch.cli.errors import EXTRAS, run_guarded
from anabranch.core.errors import MissingExtra


class Entry(NamedTuple):
    """Where a command lives (`module:attribute` under anabranch.cli) and its line in `--help`."""

    target: str
    summary: str
    hidden: bool = False


COMMANDS: dict[str, Entry] = {
    "up": Entry("up:command", "Serve a model: start a cluster on this machine and supervise it."),
    "status": Entry("status:command", "Show the members of a running cluster, their health and their load."),
    "down": Entry("down:command", "Stop a running cluster."),
    "chat": Entry("chat:command", "Chat in the terminal; each turn shows what was reused and what was computed."),
    "bench": Entry("bench:command", "Load a running endpoint with agent sessions and report TTFT, TPOT and reuse."),
    "explain": Entry("explain:command", "Say where two prompts part and how much of the cache that costs."),
    "size": Entry("size:command", "Bytes of K/V per token and block of a model, and how many requests fit."),
    "config": Entry("config:command", "Print the effective configuration and where each value comes from."),
    "doctor": Entry("doctor:command", "Check that this machine can serve, and say what to change where it cannot."),
    "directory": Entry("directory:command", "Store: run a directory, which knows who holds which value."),
    "node": Entry("node:command", "Store: run a node, which keeps values in memory and on disk."),
    "store": Entry("store:command", "Store: look after its nodes and values (status, ls, get, put, verify, drain, …)."),
    "top": Entry("top:command", "Store: watch directory and nodes live."),
    "engine": Entry("process:engine", "Run one engine of a cluster (started by `up`)."),
    "gateway": Entry("process:gateway", "Run the gateway of a cluster (started by `up`)."),
    "up-directory": Entry("process:directory", "Run the directory of a cluster (started by `up`).", hidden=True),
    "up-node": Entry("process:node", "Run one node of a cluster (started by `up`).", hidden=True),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called or asked for their own help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else load(entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else "; see `anabranch --help`"
            raise click.UsageError(f"no command '{args[0]}'{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, entry.summary) for name, entry in COMMANDS.items() if not entry.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def load(entry: Entry) -> click.Command:
    """Import a command. Raises MissingExtra when an optional dependency of it is absent."""
    module_name, _, attribute = entry.target.partition(":")
    try:
        module = importlib.import_module(f"anabranch.cli.{module_name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in EXTRAS:
            raise MissingExtra(EXTRAS[missing], missing) from error
        raise
    command = getattr(module, attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.target} is not a click command")
    return command


@click.group(
    cls=LazyGroup,
    invoke_without_command=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start here: `anabranch up`, then `anabranch chat`. Every command has --help with an example.",
)
@click.version_option(__version__, prog_name="anabranch")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def cli(debug: bool) -> None:
    """KV cache as distributed state for LLM serving."""


def main() -> None:
    """Entry point of the console script: never returns."""
    sys.exit(run_guarded(cli, sys.argv[1:]))
