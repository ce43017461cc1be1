"""`anabranch size`: what a model's K/V costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from anabranch.blocks.models.architecture import Architecture
from anabranch.blocks.models.config_json import architecture_of
from anabranch.blocks.models.gguf_metadata import architecture_of_gguf
from anabranch.blocks.models.sizing import ELEMENT_BYTES, Sizing
from anabranch.core.errors import MissingExtra, ModelFileError
from anabranch.core.units import format_bytes, parse_bytes

# SmolLM2-135M-Instruct, the model that `anabranch up` serves by default, with its K/V in float32.
DEFAULT_MODEL: dict[str, object] = {
    "model_type": "smollm2-135m",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "dtype": "float32",
}


class SizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Bytes are for one tensor-parallel rank. `fits`: sequences of `context` in the memory;
    `longest`: tokens each of `concurrency` sequences may have; None without --memory or a bound."""

    model: str
    attention: str
    layers: int
    kv_layers: int
    window_layers: int
    state_layers: int
    dtype: str
    tp: int
    block_tokens: int
    token_bytes: int
    growing_token_bytes: int
    layer_block_bytes: tuple[int, int]
    full_block_bytes: int
    state_bytes: int
    context: int
    sequence_bytes: int
    stored_bytes: int
    concurrency: int
    all_sequences_bytes: int
    memory: int | None
    fits: int | None
    longest: int | None
    model_context: int
    notes: tuple[str, ...]


def byte_count(value: str) -> int:
    """`24GiB`, `24GB` or a number of bytes. Raises click.BadParameter."""
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}") from error


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--context", type=click.IntRange(min=1), help="Tokens per sequence.  [default: the model's context]")
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True, help="Sequences at a time.")
@click.option(
    "--memory", type=byte_count, metavar="BYTES", help="Memory for K/V on one rank, e.g. 40GiB (without the weights)."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", *ELEMENT_BYTES]),
    default="auto",
    show_default=True,
    help="Type of K/V; auto takes the model's own, or bfloat16.",
)
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option("--tp", type=click.IntRange(min=1), default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(
    model: str,
    context: int | None,
    concurrency: int,
    memory: int | None,
    dtype: str,
    block_tokens: int,
    tp: int,
    as_json: bool,
) -> None:
    """Bytes of K/V per token, block and sequence of a model, and how much of it fits in a memory.

    MODEL is a Hugging Face config.json or the directory that holds one, a GGUF file, or "default" (the model that
    `anabranch up` serves). Only the configuration is read, never the weights. MHA, GQA, MLA, sliding windows,
    hybrids with Mamba or linear-attention layers, and layers that share K/V are told apart by their fields.

    \b
    Examples:
      anabranch size default
      anabranch size default --memory 512MiB --context 4096 --concurrency 8
      anabranch size ./Llama-3.1-70B/config.json --memory 40GiB --tp 4 --json
    """
    architecture = read_architecture(model)
    chosen = _dtype(architecture, dtype)
    sizing = Sizing(architecture=architecture, dtype=chosen, block_tokens=block_tokens, tp=tp)
    report = _report(sizing, context or architecture.context_tokens or 8192, concurrency, memory)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        _show(report)


def read_architecture(model: str) -> Architecture:
    """Raises ModelFileError (missing, unreadable, unknown kind) or MissingExtra (gguf)."""
    if model == "default":
        return architecture_of(DEFAULT_MODEL, "default")
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file; give a config.json, its directory, a GGUF file, or 'default'")
    if path.suffix.lower() == ".gguf":
        return architecture_of_gguf(_gguf_metadata(path), str(path))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFileError(f"{path}: not a readable config.json: {error}") from error
    return architecture_of(config, str(path))


def _gguf_metadata(path: Path) -> dict[str, object]:
    try:
        import gguf
    except ImportError as error:
        raise MissingExtra("engine", "gguf") from error
    try:
        reader: Any = gguf.GGUFReader(str(path))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelFileError(f"{path}: not a readable GGUF file: {error}") from error
    skip = ("tokenizer.",)  # a hundred thousand strings that say nothing about K/V
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith(skip)}


def _dtype(architecture: Architecture, asked: str) -> str:
    if asked != "auto":
        return asked
    return architecture.dtype if architecture.dtype in ELEMENT_BYTES else "bfloat16"


def _report(sizing: Sizing, context: int, concurrency: int, memory: int | None) -> SizeReport:
    architecture = sizing.architecture
    sequence = sizing.held_bytes(context)
    return SizeReport(
        model=architecture.name,
        attention=architecture.attention,
        layers=len(architecture.layers),
        kv_layers=architecture.kv_layers,
        window_layers=architecture.window_layers,
        state_layers=architecture.state_layers,
        dtype=sizing.dtype,
        tp=sizing.tp,
        block_tokens=sizing.block_tokens,
        token_bytes=sizing.token_bytes,
        growing_token_bytes=sizing.growing_token_bytes,
        layer_block_bytes=sizing.layer_block_bytes,
        full_block_bytes=sizing.full_block_bytes,
        state_bytes=sizing.state_bytes,
        context=context,
        sequence_bytes=sequence,
        stored_bytes=sizing.stored_bytes(context),
        concurrency=concurrency,
        all_sequences_bytes=sequence * concurrency,
        memory=memory,
        fits=None if memory is None else sizing.max_concurrency(context, memory),
        longest=None if memory is None else sizing.max_context(concurrency, memory),
        model_context=architecture.context_tokens,
        notes=architecture.notes,
    )


def _show(report: SizeReport) -> None:
    console = Console(soft_wrap=True)
    kinds = [f"{report.kv_layers} of {report.layers} layers with K/V"]
    if report.window_layers:
        kinds.append(f"{report.window_layers} of them with a sliding window")
    if report.state_layers:
        kinds.append(f"{report.state_layers} with constant state")
    rank = f", one of {report.tp} ranks" if report.tp > 1 else ""
    console.print(f"[bold]{report.model}[/bold]: {report.attention}, {', '.join(kinds)}; {report.dtype}{rank}")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, count, exact in _rows(report):
        table.add_row(name, count, exact)
    console.print(table)
    for note in report.notes:
        console.print(f"[yellow]note:[/yellow] {note}")


def _rows(report: SizeReport) -> list[tuple[str, str, str]]:
    def bytes_row(name: str, count: int) -> tuple[str, str, str]:
        return name, format_bytes(count), "" if count < 1024 else f"{count:,} B"

    small, large = report.layer_block_bytes
    rows = [bytes_row("per token", report.token_bytes)]
    if report.growing_token_bytes != report.token_bytes:
        rows.append(bytes_row("per token beyond the window", report.growing_token_bytes))
    rows.append(bytes_row(f"Full Block ({report.block_tokens} tokens)", report.full_block_bytes))
    rows.append(bytes_row("Layer Block" if small == large else "Layer Block (largest)", large))
    if report.state_bytes:
        rows.append(bytes_row("constant state per sequence", report.state_bytes))
    rows.append(bytes_row(f"one sequence of {report.context:,} tokens", report.sequence_bytes))
    if report.stored_bytes > report.sequence_bytes:
        rows.append(bytes_row("  kept whole in a store", report.stored_bytes))
    if report.concurrency > 1:
        rows.append(bytes_row(f"{report.concurrency} sequences", report.all_sequences_bytes))
    if report.memory is not None:
        rows += _fit_rows(report, format_bytes(report.memory))
    return rows


def _fit_rows(report: SizeReport, memory: str) -> list[tuple[str, str, str]]:
    fits = "any number" if report.fits is None else f"{report.fits:,}"
    if report.longest is None:
        longest, beyond = "any length", ""
    else:
        longest = f"{report.longest:,} tokens"
        beyond = f"the model itself ends at {report.model_context:,}" if report.model_context < report.longest else ""
    return [
        (f"sequences of {report.context:,} tokens in {memory}", fits, ""),
        (f"longest context at concurrency {report.concurrency} in {memory}", longest, beyond),
    ]


command = size
