"""Why two prompts part where they do: named causes, each with its remedy.

Heuristics over text, tried from the most telling to the most general; the first that holds is the cause.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from anabranch.serving.explain.document import Document
from anabranch.serving.explain.parting import Parting, resume

BEHIND = "Move it behind the stable part of the prompt, e.g. into the last user message"


class Cause(msgspec.Struct, frozen=True):
    """`name` is stable, for programs; `text` and `remedy` are for people; `harmless`: nothing to change."""

    name: str
    text: str
    remedy: str
    harmless: bool = False


_DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d{1,2}\.\d{1,2}\.\d{4}"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
_MONTH = r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_WEEKDAY = r"\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
_DAY = rf"{_DATE}|{_MONTH} \d{{1,2}}(?:,? \d{{4}})?|\d{{1,2}}\.? {_MONTH}(?: \d{{4}})?"
_ZONE = r"\s?(?:Z|UTC|GMT|[AaPp]M|[+-]\d{2}:?\d{2})"
_WHEN = rf"(?:{_WEEKDAY},? )?(?:(?:{_DAY})(?:(?:[T ,]+|, | at ){_TIME})?|{_TIME})(?:{_ZONE})?|{_WEEKDAY}"

# Order matters: the parts of a UUID are hex ids, and the parts of a date are numbers.
VALUES: tuple[tuple[str, str, str, re.Pattern[str]], ...] = (
    (
        "uuid",
        "a UUID (a request or session id)",
        "Leave the id out of the prompt, or send it as metadata",
        re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    ),
    (
        "timestamp",
        "a date or time",
        BEHIND + ", or round it (a date instead of a time)",
        re.compile(_WHEN),
    ),
    ("timestamp", "a Unix timestamp", BEHIND, re.compile(r"\b1[5-9]\d{8}(?:\d{3}|\d{6}|\.\d+)?\b")),
    (
        "random-id",
        "a random-looking id",
        "Leave the id out of the prompt, or send it as metadata",
        re.compile(r"\b(?=[0-9a-fA-F]*\d)(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,64}\b|\b[a-z]+_[A-Za-z0-9]{12,64}\b"),
    ),
    ("number", "a number that changes (a counter, a budget, a price)", BEHIND, re.compile(r"\d+(?:[.,]\d+)*")),
)


def find_cause(a: Document, b: Document, parting: Parting) -> Cause:
    """The first cause that holds; there is always one."""
    for look in (_other_model, _no_loss, _tools, _question, _json_order, _value, _whitespace, _case, _dropped, _place):
        cause = look(a, b, parting)
        if cause is not None:
            return cause
    return Cause(
        "different-text", "the prompts say different things from here on", "Put what differs as late as it can be"
    )


def _other_model(a: Document, b: Document, parting: Parting) -> Cause | None:
    if not (a.model and b.model) or a.model == b.model:
        return None
    text = f"different models ({a.model} and {b.model}) never share K/V"
    return Cause("different-model", text, "Send both to the same model")


def _no_loss(a: Document, b: Document, parting: Parting) -> Cause | None:
    if parting.identical:
        return Cause("identical", "the prompts are the same", "Nothing to change", harmless=True)
    if parting.extends:
        text = "one prompt goes on where the other ends"
        return Cause("continues", text, "Nothing to change: only what is new has to be computed", harmless=True)
    return None


def _tools(a: Document, b: Document, parting: Parting) -> Cause | None:
    if json.dumps(a.tools) == json.dumps(b.tools):
        return None
    names_a, names_b = [_tool_name(tool) for tool in a.tools], [_tool_name(tool) for tool in b.tools]
    if names_a != names_b and sorted(names_a) == sorted(names_b):
        return Cause("tool-order", "the same tools in another order", "Sort the tools by name before sending them")
    if names_a != names_b:
        gone = [name for name in names_a if name not in names_b]
        new = [name for name in names_b if name not in names_a]
        change = "; ".join(
            f"{what}: {', '.join(names)}" for what, names in (("only in A", gone), ("only in B", new)) if names
        )
        remedy = "Send the same tools every time and limit their use with tool_choice"
        return Cause("different-tools", f"different tools ({change or 'a different number'})", remedy)
    if a.tools == b.tools:
        return _reordered("a tool's definition")
    text = "a tool's definition changed (same name, other description or parameters)"
    return Cause("changed-tool", text, "Keep tool definitions fixed for a deployment")


def _tool_name(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    named = function if isinstance(function, dict) else tool if isinstance(tool, dict) else {}
    return str(named.get("name", "?"))


def _reordered(where: str) -> Cause:
    return Cause(
        "json-key-order",
        f"{where} has its JSON keys in another order or spacing",
        "Serialise with sorted keys and fixed spacing",
    )


def _question(a: Document, b: Document, parting: Parting) -> Cause | None:
    """The last of several messages differs, and no whole block behind the difference is the same again."""
    part, last = parting.b.part, len(b.messages) - 1
    if part is None or last < 1 or len(a.messages) != len(b.messages) or part.path != f"messages[{last}]":
        return None
    if parting.same_again_tokens >= parting.block_tokens or part.role == "system":
        return None
    return Cause("different-question", "only the last message differs", "Nothing to change", harmless=True)


def _json_order(a: Document, b: Document, parting: Parting) -> Cause | None:
    """Before the difference both texts are the same, so an object that encloses it begins at the same place in both."""
    offset, decoder = parting.a.offset, json.JSONDecoder()
    begin = offset
    for _ in range(32):
        begin = max(a.text.rfind("{", 0, begin), a.text.rfind("[", 0, begin))
        if begin < 0:
            return None
        try:
            one, end = decoder.raw_decode(a.text, begin)
            other, _ = decoder.raw_decode(b.text, begin)
        except json.JSONDecodeError:
            continue
        if end > offset:
            return _reordered("a JSON value") if one == other else None
    return None


def _value(a: Document, b: Document, parting: Parting) -> Cause | None:
    """A value of the same kind covers the difference in both prompts."""
    for name, what, remedy, pattern in VALUES:
        if _covers(pattern, a.text, parting.a.offset) and _covers(pattern, b.text, parting.b.offset):
            return Cause(name, f"{what}{_where(parting)}", remedy)
    return None


def _covers(pattern: re.Pattern[str], text: str, offset: int) -> bool:
    begin = max(0, offset - 80)
    return any(match.start() <= offset - begin <= match.end() for match in pattern.finditer(text[begin : offset + 80]))


def _where(parting: Parting) -> str:
    part = parting.b.part or parting.a.part
    if part is None:
        return ""
    return " in the system prompt" if part.role == "system" else f" in {part.path}"


def _differing(a: Document, b: Document, parting: Parting) -> tuple[str, str]:
    """The stretch of each prompt from the parting to where both go on alike."""
    end_a, end_b = resume(a.text, b.text, parting.a.offset)
    return a.text[parting.a.offset : end_a], b.text[parting.b.offset : end_b]


def _whitespace(a: Document, b: Document, parting: Parting) -> Cause | None:
    one, other = _differing(a, b, parting)
    if (one or other) and one.split() == other.split():
        text = f"whitespace only{_where(parting)}"
        return Cause("whitespace", text, "Build the text the same way each time: same line ends, no trailing spaces")
    return None


def _case(a: Document, b: Document, parting: Parting) -> Cause | None:
    one, other = _differing(a, b, parting)
    if one and one.casefold() == other.casefold():
        return Cause("case", f"upper and lower case only{_where(parting)}", "Write it the same way each time")
    return None


def _dropped(a: Document, b: Document, parting: Parting) -> Cause | None:
    """Messages missing in one prompt and present in the other, then the same conversation again."""
    same = 0
    while same < min(len(a.messages), len(b.messages)) and a.messages[same] == b.messages[same]:
        same += 1
    for one, other, who in ((a, b, "B"), (b, a, "A")):
        rest = other.messages[same:]
        for skip in range(1, len(one.messages) - same):
            if rest and one.messages[same + skip] == rest[0]:
                text = f"{skip} earlier message{'s' if skip > 1 else ''} left out in {who}, from messages[{same}] on"
                remedy = "Drop old messages rarely and many at a time: each time all that follows is computed again"
                return Cause("dropped-messages", text, remedy)
    return None


def _place(a: Document, b: Document, parting: Parting) -> Cause | None:
    part = parting.b.part or parting.a.part
    if part is None or not b.messages:
        return None
    if part.role in ("system", "developer"):
        remedy = "Keep the system prompt fixed; put what changes into the last user message"
        return Cause("changed-system-prompt", "the system prompt itself changed", remedy)
    remedy = "Append to the conversation instead of editing it (do not trim, reformat or strip earlier messages)"
    return Cause("changed-history", f"an earlier message was changed ({part.path}, {part.role})", remedy)
