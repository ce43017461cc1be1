from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import InvalidInput
from anabranch.serving.explain.causes import find_cause
from anabranch.serving.explain.document import Document, parse_document
from anabranch.serving.explain.parting import Parting, common_prefix, find_parting, resume, word_pieces

LONG = "You are a careful agent. " * 20


def chat(*messages: tuple[str, str], **more: object) -> str:
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in messages], **more})


def compare(a: str, b: str, block_tokens: int = 16) -> tuple[str, Parting]:
    one, other = parse_document(a, "a"), parse_document(b, "b")
    parting = find_parting(one, other, word_pieces, block_tokens)
    return find_cause(one, other, parting).name, parting


def system(one: str, other: str) -> str:
    """The cause when only the system prompt differs."""
    return compare(chat(("system", one), ("user", "hi")), chat(("system", other), ("user", "hi")))[0]


@pytest.mark.parametrize(
    ("one", "other", "cause"),
    [
        ("Now: 2026-12-01T14:03:22Z.", "Now: 2026-12-01T14:04:10Z.", "timestamp"),
        ("Today is Tue, Dec 1, 2026.", "Today is Wed, Dec 2, 2026.", "timestamp"),
        ("Today is 1 December 2026, ok", "Today is 14 December 2026, ok", "timestamp"),
        ("It is 9:30 AM now", "It is 9:30 PM now", "timestamp"),
        ("Date: 12/01/2026", "Date: 12/02/2026", "timestamp"),
        ("Today is Monday", "Today is Friday", "timestamp"),
        ("now=1764597802", "now=1764597950", "timestamp"),
        (f"{'id'} 3f2b8c1e-7a54-4d1b-9a3e-2f5b6c7d8e9f", "id 9c1d8c1e-7a54-4d1b-9a3e-2f5b6c7d8e9f", "uuid"),
        ("trace 9f8e7d6c5b4a3928", "trace 1f8e7d6c5b4a3928", "random-id"),
        ("call req_8sHd72hKq0PzLm", "call req_9sHd72hKq0PzLm", "random-id"),
        ("You have 14 steps left", "You have 13 steps left", "number"),
        ("Be  brief and kind", "Be brief and kind", "whitespace"),
        ("Be brief.\r\nBe kind.", "Be brief.\nBe kind.", "whitespace"),
        ("Be brief and Kind", "Be brief and kind", "case"),
        ("You are a pirate", "You are a lawyer", "changed-system-prompt"),
        ('Config: {"a": 1, "b": [2]} ok', 'Config: {"b": [2], "a": 1} ok', "json-key-order"),
    ],
)
def test_causes_in_a_system_prompt(one: str, other: str, cause: str) -> None:
    assert system(f"{one} {LONG}", f"{other} {LONG}") == cause
    assert system(f"{LONG}{one} {LONG}", f"{LONG}{other} {LONG}") == cause


def tool(name: str, text: str = "x") -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "description": text}}


def test_causes_in_tools() -> None:
    def tools(one: list[object], other: list[object]) -> str:
        return compare(chat(("user", "hi"), tools=one), chat(("user", "hi"), tools=other))[0]

    swapped = {"function": {"description": "x", "name": "read"}, "type": "function"}
    assert tools([tool("read"), tool("write")], [tool("write"), tool("read")]) == "tool-order"
    assert tools([tool("read")], [tool("read"), tool("write")]) == "different-tools"
    assert tools([tool("read")], [tool("read", "y")]) == "changed-tool"
    assert tools([tool("read")], [swapped]) == "json-key-order"
    assert tools([tool("read")], [tool("read")]) == "identical"


def test_causes_in_a_conversation() -> None:
    talk = [("system", LONG), ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    assert compare(chat(*talk), chat(*talk, ("user", "five")))[0] == "continues"
    assert compare(chat(*talk), chat(*talk[:1], *talk[3:], ("user", "five")))[0] == "dropped-messages"
    assert compare(chat(*talk[:1], *talk[3:]), chat(*talk))[0] == "dropped-messages"
    assert compare(chat(*talk), chat(*talk[:2], ("assistant", "too"), *talk[3:]))[0] == "changed-history"
    assert (
        compare(chat(*talk[:3], ("user", "Is it 3?")), chat(*talk[:3], ("user", "Is it 4?")))[0] == "different-question"
    )
    assert compare(chat(*talk, model="x"), chat(*talk, model="y"))[0] == "different-model"
    assert compare('{"prompt": "a b"}', '{"prompt": "c d"}')[0] == "different-text"


def test_what_is_lost_and_what_could_be_kept() -> None:
    _, parting = compare(chat(("system", f"Now: 09:30. {LONG}")), chat(("system", f"Now: 09:31. {LONG}")), 32)
    assert (parting.shared_blocks, parting.block_tokens) == (0, 32)
    assert parting.lost_blocks == parting.b.tokens // 32 > 3
    assert parting.lost_percent == 100
    assert parting.same_again_tokens > 100
    assert parting.b.part is not None
    assert (parting.b.part.path, parting.b.part.role, parting.b.part_offset) == ("messages[0]", "system", 9)
    assert (parting.a.before[-4:], parting.a.after[:2], parting.b.after[:2]) == ("09:3", "0.", "1.")


def test_another_model_shares_nothing() -> None:
    _, parting = compare(chat(("user", LONG), model="x"), chat(("user", LONG), model="y"))
    assert parting.shared_blocks == 0


def test_token_ids_are_compared_as_they_are() -> None:
    one, other = list(range(40)), [*range(36), 99, 98]
    cause, parting = compare(json.dumps({"prompt": one}), json.dumps({"prompt": other}))
    assert (parting.token, parting.shared_blocks, parting.lost_blocks) == (36, 2, 0)
    assert cause == "different-text"
    with pytest.raises(InvalidInput, match="same form"):
        compare(json.dumps({"prompt": one}), "some text")


def test_parts_are_found_even_where_headings_contain_them() -> None:
    document = parse_document(chat(("user", "s"), ("assistant", "a"), ("user", "r")), "x")
    assert [document.text[part.start : part.end] for part in document.parts] == ["s", "a", "r"]


def test_content_parts_and_tool_calls_count() -> None:
    body = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}],
            },
            {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}]},
        ]
    }
    text = parse_document(json.dumps(body), "x").text
    assert "see" in text
    assert "image_url" in text
    assert "call_1" in text


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("{", "not valid JSON"),
        ('{"a": 1}', "needs 'messages' or 'prompt'; it has a"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [1]}', r"messages\[0\] must be an object with a role"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content must be a text"),
        ('{"prompt": [1, "a"]}', "list of token ids"),
    ],
)
def test_bad_bodies(raw: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        parse_document(raw, "a.json")


def test_text_files_are_text() -> None:
    assert parse_document("{not json", "a.txt") == Document(
        name="a.txt", text="{not json", parts=parse_document("{not json", "a.txt").parts
    )


@given(st.text("ab"), st.text("ab"))
def test_common_prefix(one: str, other: str) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@given(st.text("abc ", max_size=20), st.text("xyz ", max_size=20), st.text(min_size=30, max_size=60))
def test_resume_finds_where_both_go_on(one: str, other: str, rest: str) -> None:
    back_one, back_other = resume(one + rest, other + rest, 0)
    assert (one + rest)[back_one : back_one + 24] == (other + rest)[back_other : back_other + 24]
    assert back_one + back_other <= len(one) + len(other)


@given(st.text())
def test_word_pieces_cover_the_text(text: str) -> None:
    pieces = word_pieces(text)
    assert "".join(text[start:end] for _, start, end in pieces) == text
    assert all(text[start:end] == piece for piece, start, end in pieces)
