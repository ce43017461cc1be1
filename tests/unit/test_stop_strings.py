"""Stop strings, and the text that choices are made of."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from anabranch.engine.messages import TokenEvent
from anabranch.engine.request import FinishReason, TokenLogprob
from anabranch.serving.assembly import ChoiceText, Piece
from anabranch.serving.detokenizer import ByteDetokenizer
from anabranch.serving.stops import StopMatcher

BYTES = [bytes((value,)) for value in range(256)]
LETTERS = "ab€"


def first_completed(text: str, stops: list[str]) -> str:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@given(
    st.text(LETTERS, max_size=30),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_any_cut_of_the_text_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    out = ""
    for start, end in itertools.pairwise(places):
        out += matcher.push(text[start:end])
        assert first_completed(text, stops).startswith(out)
    if not matcher.stopped:
        out += matcher.finish()
    assert out == first_completed(text, stops)


def test_a_possible_beginning_is_held_back_and_no_more() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == "the "
    assert matcher.push("N") == ""
    assert matcher.push("V") == "ENV"
    assert matcher.push(" EN") == " "
    assert matcher.finish() == "EN"


def run(text: ChoiceText, data: bytes, finish: FinishReason = "length") -> list[Piece]:
    last = len(data) - 1
    return [
        text.push(
            TokenEvent(
                request_id="r",
                index=0,
                token=byte,
                logprob=TokenLogprob(-float(place)),
                finish=finish if place == last else None,
            )
        )
        for place, byte in enumerate(data)
    ]


def choice(*stops: str, stop_ids: tuple[int, ...] = ()) -> ChoiceText:
    return ChoiceText(0, ByteDetokenizer(BYTES), StopMatcher(stops), stop_ids)


def test_a_stop_string_ends_the_choice_and_its_log_probabilities() -> None:
    text = choice("XY")
    pieces = run(text, b"abXYcd")
    assert "".join(piece.text for piece in pieces) == "ab"
    assert text.finish == "stop"
    assert text.tokens == 4
    assert [entry.logprob for piece in pieces for entry in piece.entries] == [0.0, -1.0]
    assert [piece.finish for piece in pieces] == [None, None, None, "stop", None, None]


def test_log_probabilities_wait_for_their_text() -> None:
    pieces = run(choice("XY"), b"aXbc")
    assert [piece.text for piece in pieces] == ["a", "", "Xb", "c"]
    assert [[entry.token for entry in piece.entries] for piece in pieces] == [[97], [], [88, 98], [99]]
    assert [entry.offset for piece in pieces for entry in piece.entries] == [0, 1, 2, 3]


def test_a_character_in_two_tokens_comes_whole() -> None:
    pieces = run(choice(), "é!".encode())
    assert [piece.text for piece in pieces] == ["", "é", "!"]


def test_a_stop_token_has_no_text() -> None:
    pieces = run(choice(stop_ids=(33,)), b"ab!", finish="stop")
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].finish == "stop"
    assert len([entry for piece in pieces for entry in piece.entries]) == 2


def test_what_was_held_back_comes_with_the_end() -> None:
    pieces = run(choice("ENDING"), b"the END")
    assert "".join(piece.text for piece in pieces) == "the END"
    pieces = run(choice(), "é".encode()[:1])
    assert pieces[-1].text == "�"
