"""From an engine's tokens to the pieces of text a client gets, one choice at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from anabranch.engine.messages import TokenEvent
from anabranch.engine.request import FinishReason
from anabranch.serving.detokenizer import Detokenizer
from anabranch.serving.stops import StopMatcher


class Entry(msgspec.Struct, frozen=True):
    """The log probability of one sent token. `offset`: where its text starts in the choice's text."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int


class Piece(msgspec.Struct, frozen=True):
    """What one token adds: text that is safe to send, log probabilities of tokens whose text is out, the end."""

    index: int
    text: str
    entries: list[Entry]
    finish: FinishReason | None


class ChoiceText:
    """Detokenizes, cuts at stop strings, keeps log probabilities in step with the text."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: StopMatcher, stop_token_ids: Collection[int]
    ) -> None:
        self.index = index
        self.tokens = 0
        self.finish: FinishReason | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._stop_ids = stop_token_ids
        self._decoded = 0
        self._sent = 0
        self._entries: list[Entry] = []

    def push(self, event: TokenEvent) -> Piece:
        """Tokens that come after the end add nothing."""
        if self.finish is not None:
            return Piece(self.index, "", [], None)
        self.tokens += 1
        stopped_here = event.finish == "stop" and event.token in self._stop_ids
        if event.logprob is not None and not stopped_here:
            self._entries.append(Entry(event.token, event.logprob.logprob, event.logprob.top, self._decoded))
        decoded = "" if stopped_here else self._detokenizer.push(event.token)
        self.finish = event.finish
        if event.finish is not None:
            decoded += self._detokenizer.finish()
        self._decoded += len(decoded)
        text = self._stops.push(decoded)
        if self._stops.stopped:
            self.finish = "stop"
            # A token whose text begins at or behind the cut was never said.
            self._entries = [entry for entry in self._entries if entry.offset < self._sent + len(text)]
        elif self.finish is not None:
            text += self._stops.finish()
        self._sent += len(text)
        return Piece(self.index, text, self._ripe(), self.finish)

    def _ripe(self) -> list[Entry]:
        if self.finish is not None or self._sent >= self._decoded:
            ripe, self._entries = self._entries, []
            return ripe
        ripe = [entry for entry in self._entries if entry.offset < self._sent]
        self._entries = self._entries[len(ripe) :]
        return ripe


def choice_texts(
    count: int,
    detokenizer: Callable[[], Detokenizer],
    stops: Collection[str],
    stop_token_ids: Collection[int],
    *,
    first_index: int = 0,
) -> list[ChoiceText]:
    ids = frozenset(stop_token_ids)
    return [ChoiceText(first_index + index, detokenizer(), StopMatcher(tuple(stops)), ids) for index in range(count)]
