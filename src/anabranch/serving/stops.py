"""Stop strings over streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts text at the first stop string to be completed; a possible beginning of one is held back.

    The result does not depend on how the text is cut into pieces: the match that ends first wins, and of those the
    longest. Once `stopped`, nothing more comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._starts = {stop[0] for stop in stops}
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that is safe to send now."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        keep = self._possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The end of the text: what was held back belongs to it."""
        held, self._held = self._held, ""
        return held

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            at = len(text) - size
            if text[at] in self._starts and any(stop.startswith(text[at:]) for stop in self._stops):
                return size
        return 0
