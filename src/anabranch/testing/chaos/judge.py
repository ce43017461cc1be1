"""What an answer is worth: compared token by token with what it must be."""

from __future__ import annotations

from typing import Literal

import msgspec

from anabranch.testing.chaos.workload import Ask

Verdict = Literal["right", "refused", "left", "lost", "wrong"]


class Outcome(msgspec.Struct, kw_only=True):
    """What a client saw. `finishes[i]` "" : choice i did not end. `error`: code of an explicit error, "" for none.
    `left`: the client went away itself. `cut`: the connection ended without an end mark and without an error."""

    choices: list[list[int]]
    finishes: list[str]
    error: str = ""
    message: str = ""
    left: bool = False
    cut: bool = False
    prompt_tokens: int | None = None
    request_id: str = ""

    @classmethod
    def empty(cls, ask: Ask) -> Outcome:
        return cls(choices=[[] for _ in range(ask.n)], finishes=["" for _ in range(ask.n)])


class Judgement(msgspec.Struct, frozen=True):
    verdict: Verdict
    reason: str = ""


def judge(ask: Ask, seen: Outcome) -> Judgement:
    """ "right": exactly the expected answer. "refused": an explicit error, and nothing wrong before it. "left": the
    client left, and nothing wrong before it. "lost": the connection broke. "wrong": anything else, above all a token
    that is not the expected one."""
    for index, (tokens, (expected, finish)) in enumerate(zip(seen.choices, ask.expected, strict=True)):
        if tokens != expected[: len(tokens)]:
            return Judgement("wrong", _difference(index, tokens, expected))
        ended = seen.finishes[index]
        if ended and (ended != finish or len(tokens) != len(expected)):
            why = (
                f"choice {index} ended with {ended!r} after {len(tokens)} tokens, not {finish!r} after {len(expected)}"
            )
            return Judgement("wrong", why)
    if seen.prompt_tokens is not None and seen.prompt_tokens != len(ask.tokens):
        return Judgement("wrong", f"usage counts {seen.prompt_tokens} prompt tokens of {len(ask.tokens)}")
    if seen.error:
        return Judgement("refused", seen.error)
    if seen.left:
        return Judgement("left")
    if seen.cut:
        return Judgement("lost", seen.message)
    missing = [index for index, ended in enumerate(seen.finishes) if not ended]
    if missing:
        return Judgement("wrong", f"complete without the end of choices {missing}")
    return Judgement("right")


def _difference(index: int, tokens: list[int], expected: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(expected))
    got = tokens[at] if at < len(tokens) else None
    want = expected[at] if at < len(expected) else "nothing more"
    return f"choice {index}, token {at}: {got} instead of {want}"
