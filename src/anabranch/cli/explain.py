"""`anabranch explain`: where two prompts part and why."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from anabranch.cluster.live.run_folder import default_data_dir
from anabranch.cluster.spec import ClusterConfig
from anabranch.core.errors import InvalidInput, MissingExtra, RequestError
from anabranch.serving.explain.causes import Cause, find_cause
from anabranch.serving.explain.document import Document, Render, parse_document
from anabranch.serving.explain.parting import Parting, Side, Tokenize, find_parting, word_pieces
from anabranch.serving.live.token_offsets import find_prepared, load_offsets


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `tokenizer`: the model's directory, or "estimate"."""

    tokenizer: str
    parting: Parting
    lost_percent: float
    cause: Cause


@click.command()
@click.argument("a", metavar="A.json")
@click.argument("b", metavar="B.json")
@click.option(
    "--model", "model_path", metavar="PATH", help="Directory with tokenizer.json.  [default: the prepared one]"
)
@click.option("--block-tokens", type=click.IntRange(min=1), default=16, show_default=True, help="Tokens per block.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def explain(a: str, b: str, model_path: str | None, block_tokens: int, as_json: bool) -> None:
    """Where two prompts part, how many blocks of the cache B loses because of it, why, and what to change.

    A and B are request bodies, {"messages": [...]} or {"prompt": ...}, or text files; "-" reads one from stdin.
    K/V can be reused up to the first token that differs: one changed character at the top makes everything behind
    it new. Tokens are counted with the tokenizer of --model, or of the model that `anabranch up` prepared, or else
    estimated.

    \b
    Example:
      echo '{"prompt": "Now: 2026-12-01 09:30. You are a helpful agent. Answer briefly."}' > a.json
      echo '{"prompt": "Now: 2026-12-01 09:31. You are a helpful agent. Answer briefly."}' > b.json
      anabranch explain a.json b.json --block-tokens 4
    """
    tokenize, render, tokenizer = _tokenizer(model_path)
    if a == b == "-":
        raise InvalidInput("only one of the two prompts can come from stdin")
    try:
        documents = _read(a, render), _read(b, render)
    except RequestError:  # the model's template refuses these messages: lay them out in the common way
        documents = _read(a, None), _read(b, None)
    parting = find_parting(*documents, tokenize, block_tokens)
    cause = find_cause(*documents, parting)
    if as_json:
        answer = Explanation(tokenizer=tokenizer, parting=parting, lost_percent=parting.lost_percent, cause=cause)
        click.echo(msgspec.json.encode(answer))
    else:
        _show(parting, cause, tokenizer, *documents)


def _tokenizer(model_path: str | None) -> tuple[Tokenize, Render | None, str]:
    path = Path(model_path) if model_path else find_prepared(default_data_dir(ClusterConfig()) / "models")
    if path is None:
        return word_pieces, None, "estimate"
    try:
        tokenize, render = load_offsets(path, datetime.now())
    except MissingExtra:
        if model_path:
            raise
        return word_pieces, None, "estimate"
    return tokenize, render, str(path)


def _read(path: str, render: Render | None) -> Document:
    try:
        with click.open_file(path, encoding="utf-8") as file:
            return parse_document(file.read(), "stdin" if path == "-" else path, render)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot read the prompt: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: cannot read the prompt: {error}") from error


def _show(parting: Parting, cause: Cause, tokenizer: str, a: Document, b: Document) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if not parting.identical:
        console.print(f"The prompts part at token [bold]{parting.token:,}[/bold] {_place(parting.b)}:")
        for name, side in (("A", parting.a), ("B", parting.b)):
            after = escape(repr(side.after)[1:-1]) or "(end)"
            console.print(f"  {name}  …{escape(repr(side.before)[1:-1])}[bold yellow]{after}[/bold yellow]")
    shared = parting.shared_blocks * parting.block_tokens
    total = parting.shared_blocks + parting.lost_blocks
    console.print(
        f"B has {parting.b.tokens:,} tokens ({total:,} block{'' if total == 1 else 's'} of {parting.block_tokens}): "
        f"[green]{parting.shared_blocks:,} shared[/green] ({shared:,} tokens), "
        f"[red]{parting.lost_blocks:,} to compute[/red] ({parting.lost_percent:.1f} %)"
    )
    console.print(f"[bold]Why:[/bold] {escape(cause.text)} [dim]({cause.name})[/dim]")
    console.print(f"[bold]Remedy:[/bold] {escape(cause.remedy)}")
    blocks = parting.same_again_tokens // parting.block_tokens
    if not cause.harmless and blocks:
        console.print(
            f"Behind it the next {parting.same_again_tokens:,} tokens are the same again: {blocks:,} more blocks."
        )
    if tokenizer == "estimate" and a.tokens is None:
        why = "for exact ones prepare a model with `anabranch up`, or use --model (both need anabranch\\[serve])"
        console.print(f"[dim]Token counts are estimated; {why}.[/dim]")


def _place(side: Side) -> str:
    if side.part is None:
        return "(the end)" if side.after == "" else ""
    role = f" ({side.part.role})" if side.part.role not in ("", "tools") else ""
    return f"in {side.part.path}{role}, character {side.part_offset:,}"


command = explain
