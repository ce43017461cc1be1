"""Tokens become text exactly, whatever the cut, and never half a character at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from anabranch.serving.detokenizer import ByteDetokenizer, Detokenizer, NumberedDetokenizer, numbered_tokens
from anabranch.serving.live.tokenizer import NumberedTokenizer

any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
VOCAB = 70_000


def decode(detokenizer: Detokenizer, tokens: list[int]) -> tuple[str, list[str]]:
    pieces = [detokenizer.push(token) for token in tokens]
    pieces.append(detokenizer.finish())
    return "".join(pieces), pieces


@given(any_text, st.lists(st.integers(1, 5), max_size=60))
def test_any_text_survives_any_cut_into_tokens(text: str, sizes: list[int]) -> None:
    data = text.encode()
    table: list[bytes] = []
    for size in [*sizes, len(data)]:
        table.append(data[:size])
        data = data[size:]
    whole, pieces = decode(ByteDetokenizer(table), list(range(len(table))))
    assert whole == text
    assert "�" in text or not any("�" in piece for piece in pieces)


@given(st.lists(st.binary(max_size=4), max_size=20))
def test_any_bytes_read_as_they_would_at_once(table: list[bytes]) -> None:
    whole, _ = decode(ByteDetokenizer(table), list(range(len(table))))
    assert whole == b"".join(table).decode(errors="replace")


@given(st.lists(st.one_of(st.integers(0, 255), st.integers(0, VOCAB - 1)), max_size=40))
def test_stand_in_text_gives_back_its_tokens(tokens: list[int]) -> None:
    text, _ = decode(NumberedDetokenizer(), tokens)
    assert numbered_tokens(text, VOCAB) == tokens


@given(any_text.map(lambda text: text.replace("⟨", "")))
def test_stand_in_tokens_give_back_their_text(text: str) -> None:
    tokens = NumberedTokenizer(VOCAB).encode(text)
    assert tokens == list(text.encode())
    assert decode(NumberedDetokenizer(), tokens)[0] == text


def test_special_and_unknown_tokens_are_silent() -> None:
    detokenizer = ByteDetokenizer([b"a", b"<end>"], frozenset({1}))
    assert decode(detokenizer, [0, 1, 99, -1, 0])[0] == "aa"
