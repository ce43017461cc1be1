"""`anabranch bench`: load on a running endpoint."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anabranch.core.errors import InvalidInput
from anabranch.serving.replay import ReplayPlan, ReplaySummary, Spread, TurnResult, plan_replay, summarize
from anabranch.serving.served import seconds
from anabranch.traces.live.files import EXCERPT, read_trace
from anabranch.traces.synth import PLAIN_TOKENS

DEFAULT_CONTEXT = 4096
DEFAULT_BLOCK_TOKENS = 16


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line of one run, kept with its results."""

    url: str
    model: str | None
    trace: str
    sessions: int
    turns: int
    context: int | None
    concurrency: int
    max_tokens: int
    block_tokens: int | None
    think: float
    seed: int
    token_range: tuple[int, int] | None
    lenient: bool


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes. `complete`: every planned turn has been sent."""

    model: str
    context: int
    complete: bool
    planned_turns: int
    options: BenchOptions
    machine: dict[str, str]
    summary: ReplaySummary
    turns: list[TurnResult]


def token_range(value: str) -> tuple[int, int]:
    """`FIRST:LAST`, LAST excluded. Raises click.BadParameter."""
    first, _, last = value.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise click.BadParameter(f"{value!r} is not a range of token ids; write it like 1000:30000")
    return int(first), int(last)


def plain_tokens(vocab_size: int | None) -> range:
    """PLAIN_TOKENS where the vocabulary has them; of a small one, all but the first."""
    if vocab_size is None or vocab_size >= PLAIN_TOKENS.stop:
        return PLAIN_TOKENS
    return range(1, vocab_size)


@click.group()
def bench() -> None:
    """Measure a running endpoint.

    \b
    Example:
      anabranch up &
      anabranch bench serve --sessions 4 --turns 6 --context 2048
    """


@bench.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL of the endpoint.")
@click.option(
    "--api-key", envvar="ANABRANCH_API_KEY", default="", help="Key, if it wants one.  [env: ANABRANCH_API_KEY]"
)
@click.option("--model", help="Model to ask for.  [default: the first served]")
@click.option("--trace", default="", metavar="FILE", help="Trace file, .gz or not.  [default: a shipped excerpt]")
@click.option("--lenient", is_flag=True, help="Skip bad lines of the trace instead of stopping.")
@click.option("--sessions", type=click.IntRange(min=1), default=8, show_default=True, help="Sessions to replay.")
@click.option("--turns", type=click.IntRange(min=1), default=8, show_default=True, help="Turns of each session.")
@click.option("--context", type=click.IntRange(min=16), help="Scale sessions to this.  [default: the model's context]")
@click.option("--concurrency", type=click.IntRange(min=1), default=2, show_default=True, help="Sessions at a time.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True, help="Longest answer.")
@click.option(
    "--block-tokens", type=click.IntRange(min=1), help="The server's blocks.  [default: what it says, else 16]"
)
@click.option(
    "--think", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Factor on recorded pauses."
)
@click.option(
    "--seed", type=click.IntRange(min=0, max=2**63 - 1), help="Same seed, same prompts.  [default: a new one]"
)
@click.option(
    "--token-range",
    type=token_range,
    metavar="FIRST:LAST",
    help=f"Token ids to write prompts with.  [default: {PLAIN_TOKENS.start}:{PLAIN_TOKENS.stop} if it has them]",
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Write everything as JSON; - for stdout instead of the table."
)
@click.pass_context
def serve(ctx: click.Context, /, api_key: str, json_file: str | None, seed: int | None, **named: object) -> None:
    """Replay recorded agent sessions and report TTFT, TPOT and how much of the prompts was reused.

    A trace holds lengths and block ids, no text: every block id becomes the same token ids wherever it occurs, and
    all lengths of a session are scaled by one factor so that it fits the context. Each turn is compared with an ideal
    cache that holds everything this run has sent before. With a new seed the run starts cold; with the seed of an
    earlier run it finds what that one left (and may reuse more than the ideal of its own).

    Ctrl-C (or SIGTERM) stops and reports what has been measured. With --json FILE each turn is also kept in FILE.part
    as it ends.

    \b
    Examples:
      anabranch bench serve --sessions 4 --turns 6 --context 2048
      anabranch bench serve --trace sessions.jsonl.gz --concurrency 8 --json result.json
    """
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    options = msgspec.convert({**named, "seed": seed}, BenchOptions)
    run = _Run(options, api_key, json_file)
    interrupted = False
    try:
        asyncio.run(run.go())
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C and SIGTERM
        interrupted = True
    if run.plan is None:
        raise click.Abort
    report = run.report()
    if json_file == "-":
        click.echo(msgspec.json.encode(report))
    else:
        _show(report)
    run.keep(report)
    if interrupted:
        ctx.exit(130)
    if report.summary.failed or not report.complete:
        ctx.exit(1)


class _Run:
    """Plans, replays and keeps what has been measured, whatever happens in between."""

    def __init__(self, options: BenchOptions, api_key: str, json_file: str | None) -> None:
        self.options = options
        self.plan: ReplayPlan | None = None
        self.results: list[TurnResult] = []
        self._api_key = api_key
        self._file = Path(json_file) if json_file and json_file != "-" else None
        self._part = self._file and self._file.with_name(self._file.name + ".part")
        self._model, self._context = "", 0
        self._block_tokens, self._vocabulary = DEFAULT_BLOCK_TOKENS, PLAIN_TOKENS
        self._start_s = self._end_s = 0.0

    async def go(self) -> None:
        from anabranch.serving.live.endpoint import Endpoint  # needs httpx; --help does not
        from anabranch.serving.live.replayer import Replayer

        options = self.options
        _end_on_sigterm()
        async with Endpoint(options.url, api_key=self._api_key) as endpoint:
            card = await endpoint.choose(options.model)
            self._model = card.name
            self._context = options.context or card.context_tokens or DEFAULT_CONTEXT
            self._block_tokens = options.block_tokens or card.block_tokens or DEFAULT_BLOCK_TOKENS
            self._vocabulary = range(*options.token_range) if options.token_range else plain_tokens(card.vocab_size)
            plan = self._plan()
            with _PartFile(self._part) as keep, _Bar(plan.turns) as advance:

                def on_turn(result: TurnResult) -> None:
                    self.results.append(result)
                    self._end_s = time.monotonic()
                    keep(result)
                    advance()

                self._start_s = self._end_s = time.monotonic()
                self.plan = plan
                replayer = Replayer(
                    endpoint,
                    card.name,
                    plan,
                    on_turn,
                    block_tokens=self._block_tokens,
                    think_factor=options.think,
                )
                await replayer.run(options.concurrency)

    def _plan(self) -> ReplayPlan:
        options = self.options
        requests, reader = read_trace(options.trace, lenient=options.lenient)
        if reader.skipped:
            click.echo(f"skipped {reader.skipped} bad lines; the first: {reader.first_reason}", err=True)
        return plan_replay(
            requests,
            sessions=options.sessions,
            turns=options.turns,
            context=self._context,
            max_output=options.max_tokens,
            vocabulary=self._vocabulary,
            seed=options.seed,
        )

    def report(self) -> BenchReport:
        planned = self.plan.turns if self.plan else 0
        return BenchReport(
            model=self._model,
            context=self._context,
            complete=len(self.results) == planned,
            planned_turns=planned,
            options=self.options,
            machine={"system": platform.platform(), "cpus": str(os.cpu_count()), "python": platform.python_version()},
            summary=summarize(self.results, self._end_s - self._start_s, self._block_tokens),
            turns=self.results,
        )

    def keep(self, report: BenchReport) -> None:
        if self._file is not None:
            self._file.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
        if self._part is not None:
            self._part.unlink(missing_ok=True)


def _end_on_sigterm() -> None:
    """SIGTERM (from `timeout`, say) cancels the run as Ctrl-C does, so that it still reports."""
    task = asyncio.current_task()
    if task is not None and threading.current_thread() is threading.main_thread():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


class _PartFile:
    """Appends each result to a file as it comes, so that even a killed run leaves what it measured."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._file = None if path is None else path.open("wb", buffering=0)
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror}; choose another --json FILE") from error

    def __enter__(self) -> Callable[[TurnResult], None]:
        return self._keep

    def _keep(self, result: TurnResult) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(result) + b"\n")

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


class _Bar:
    """A bar on stderr, if that is a terminal."""

    def __init__(self, turns: int) -> None:
        self._bar = Progress(
            TextColumn("turns"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("turns", total=turns)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _show(report: BenchReport) -> None:
    console, summary = Console(soft_wrap=True, highlight=False), report.summary
    options = report.options
    state = (
        "" if report.complete else f" [yellow](stopped after {len(report.turns)} of {report.planned_turns})[/yellow]"
    )
    console.print(
        f"[bold]{report.model}[/bold] at {options.url}: {summary.turns} turns of {options.trace or EXCERPT}, scaled to "
        f"{report.context:,} tokens, {options.concurrency} at a time, seed {options.seed}{state}"
    )
    table = Table("", "p50", "p90", "p99", "mean", "turns", box=None, pad_edge=False, header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in (
        ("TTFT", summary.ttft_s),
        ("  first turns", summary.first_ttft_s),
        ("  later turns", summary.later_ttft_s),
        ("TPOT", summary.tpot_s),
        ("whole answer", summary.total_s),
    ):
        table.add_row(name, *_cells(values, seconds))
    table.add_row("blocks missed", *_cells(summary.missed_blocks, lambda value: f"{value:.2f}"))
    console.print(table)
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in summary.tiers.items())
    console.print(
        f"prompt tokens {summary.prompt_tokens:,}: [green]{100 * summary.cached_share:.1f} % reused[/green] ({tiers}), "
        f"ideal {100 * summary.ideal_share:.1f} %; {summary.short_turns} turns more than one block short of it"
    )
    console.print(
        f"{summary.output_tokens:,} tokens in {summary.duration_s:.1f} s: {summary.output_tokens_per_s:.1f} tokens/s"
    )
    for reason, count in summary.errors.items():
        console.print(f"[red]{count} failed:[/red] {escape(reason)}")


def _cells(values: Spread, write: Callable[[float], str]) -> list[str]:
    figures = (values.p50, values.p90, values.p99, values.mean)
    return ["–" if figure is None else write(figure) for figure in figures] + [str(values.count)]


command = bench
