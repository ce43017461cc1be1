"""`anabranch chat`: a conversation in the terminal that shows what each turn reused."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from anabranch.core.errors import Overloaded, RequestError
from anabranch.serving.served import Served, reuse_line

if TYPE_CHECKING:
    from anabranch.serving.live.endpoint import Endpoint

COMMANDS = "/exit ends, /reset starts anew, /stats adds up the turns so far, /save FILE writes the conversation as JSON"
OVERLOAD_TRIES = 10


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints after each turn, one line each."""

    user: str
    answer: Served


class Conversation:
    """Messages so far and what they cost. No IO."""

    def __init__(self, system: str) -> None:
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)
        self.answers: list[Served] = []

    def reset(self) -> None:
        self.messages = list(self._system)
        self.answers = []

    def asked(self, text: str) -> list[dict[str, str]]:
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, text: str, answer: Served) -> None:
        self.messages = [*self.asked(text), {"role": "assistant", "content": answer.text}]
        self.answers.append(answer)

    def stats(self) -> str:
        prompt = sum(answer.prompt_tokens for answer in self.answers)
        cached = sum(answer.cached_tokens for answer in self.answers)
        output = sum(answer.output_tokens for answer in self.answers)
        share = 100 * cached / prompt if prompt else 0.0
        return (
            f"{len(self.answers)} turns · prompts {prompt:,} tokens, {cached:,} reused ({share:.1f} %), "
            f"{prompt - cached:,} computed · answers {output:,} tokens"
        )


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Base URL of the endpoint.")
@click.option(
    "--api-key", envvar="ANABRANCH_API_KEY", default="", help="Key, if it wants one.  [env: ANABRANCH_API_KEY]"
)
@click.option("--model", help="Model to ask for.  [default: the first served]")
@click.option("--system", default="", metavar="TEXT", help="System prompt.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer.")
@click.option("--temperature", type=click.FloatRange(0, 2), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per turn instead of text.")
def chat(
    url: str, api_key: str, model: str | None, system: str, max_tokens: int, temperature: float, as_json: bool
) -> None:
    """Chat in the terminal. Under each answer: how many prompt tokens were reused (by tier) and computed, TTFT, speed.

    /exit ends, /reset starts anew, /stats adds up the turns so far, /save FILE writes the conversation as a request
    body (which `anabranch explain` reads). Ctrl-C stops an answer. Input may be piped: one line is one turn.

    \b
    Examples:
      anabranch chat --system "You are brief."
      printf 'Hello\\nWhat did I just say?\\n' | anabranch chat
    """
    from anabranch.serving.live.endpoint import Endpoint  # needs httpx; --help does not

    with asyncio.Runner() as runner:
        _Chat(runner, Endpoint(url, api_key=api_key), Conversation(system), max_tokens, temperature, as_json).run(model)


class _Chat:
    def __init__(
        self,
        runner: asyncio.Runner,
        endpoint: Endpoint,
        conversation: Conversation,
        max_tokens: int,
        temperature: float,
        as_json: bool,
    ) -> None:
        self._runner = runner
        self._endpoint = endpoint
        self._conversation = conversation
        self._settings = {"max_tokens": max_tokens, "temperature": temperature}
        self._json = as_json
        self._interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._model = ""

    def run(self, model: str | None) -> None:
        try:
            self._model = self._runner.run(self._endpoint.choose(model)).name
            if self._interactive:
                with suppress(ImportError):
                    import readline  # noqa: F401  (gives `input` its line editing and history)
                click.secho(f"{self._model} at {self._endpoint.url}. {COMMANDS}.", dim=True)
            while True:
                line = self._line()
                if line is None or line == "/exit":
                    return
                if line.startswith("/"):
                    self._obey(line)
                elif line:
                    self._turn(line)
        finally:
            self._runner.run(self._endpoint.__aexit__())

    def _line(self) -> str | None:
        """The next line, stripped; None at the end of the input."""
        try:
            if self._interactive:
                return input("> ").strip()
            line = sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            return None
        return line.strip() if line else None

    def _obey(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._conversation.reset()
            self._note("a new conversation")
        elif word == "/stats":
            self._note(self._conversation.stats())
        elif word == "/save":
            self._save(rest.strip())
        else:
            self._note(f"no command {word}; {COMMANDS}")

    def _save(self, path: str) -> None:
        body = {"model": self._model, "messages": self._conversation.messages}
        try:
            Path(path).expanduser().write_text(json.dumps(body, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            self._note(f"cannot save to {path or 'a file without a name'}: {error.strerror}; write /save FILE")
        else:
            self._note(f"saved to {path}")

    def _turn(self, text: str) -> None:
        try:
            answer = self._runner.run(self._ask(text))
        except KeyboardInterrupt:
            click.echo()
            self._note("stopped; this turn is forgotten")
            return
        except (RequestError, Overloaded) as error:
            # The conversation is as it was: the next line may do better. Piped input has no next try.
            if not self._interactive:
                raise
            self._note(str(error))
            return
        self._conversation.answered(text, answer)
        if self._json:
            click.echo(msgspec.json.encode(TurnRecord(user=text, answer=answer)))
            return
        click.echo("" if answer.text.endswith("\n") else "\n", nl=False)
        self._note(reuse_line(answer))

    async def _ask(self, text: str) -> Served:
        body = {"model": self._model, "messages": self._conversation.asked(text), **self._settings}
        for _ in range(OVERLOAD_TRIES - 1):
            try:
                return await self._endpoint.stream("/v1/chat/completions", body, self._print)
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)
        return await self._endpoint.stream("/v1/chat/completions", body, self._print)

    def _print(self, text: str) -> None:
        if not self._json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def _note(self, text: str) -> None:
        click.secho(text, dim=True, err=self._json)


command = chat
