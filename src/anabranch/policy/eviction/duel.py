"""Two small caches of names alone that tell whether worth or recency has had more hits of late.

Every `share`-th block, by a hash of its name, goes through both, each with that share of the pool's slots: a miniature
behaves like the whole (Waldspurger, Park, Garthwaite, Ahmad, "Efficient MRC construction with SHARDS", FAST 2015).
**See also** `cost`, which follows the winner.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from zlib import crc32

LOOKED_AT = 32
SHARE = 8
SLOTS_AT_LEAST, SLOTS_AT_MOST = 256, 1024
MARGIN = 0.02  # hits per slot by which worth must lead: a tie is LRU's
FORGOTTEN_AFTER = 20  # blocks asked for, per slot: the weight of hits falls to 1/e
Worths = Sequence[Sequence[float]]


class Duel:
    """`slots`: the whole pool's. `worth_leads`: keeping what is worth most has had more hits than LRU."""

    def __init__(self, slots: int) -> None:
        share = SHARE
        while share > 1 and slots < share * SLOTS_AT_LEAST:
            share //= 2
        while slots > share * SLOTS_AT_MOST:
            share *= 2
        self._mask = share - 1
        self._memory = FORGOTTEN_AFTER * slots
        self.slots = slots // share
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._worthy: dict[bytes, list[int]] = {}
        """Name → kind, time and rank of its last use (later, nearer to the first block: higher), place in `_names`."""
        self._names: list[bytes] = []
        self._lead = 0.0
        self._draw = 1
        self._undrawn = 0
        self._rank = 0

    @property
    def worth_leads(self) -> bool:
        return self._lead > MARGIN * self.slots

    def drawn(self, key: bytes) -> bool:
        return not crc32(key) & self._mask

    def asked(self, prompt: Sequence[tuple[bytes, int]], blocks: int, clock: int, worths: Worths) -> None:
        """A prompt of `blocks` blocks was asked for: `prompt` are the drawn ones of them, with their new kinds."""
        self._undrawn += blocks
        if not prompt:
            return
        recent, worthy = self._recent, self._worthy
        lead = sum(key in worthy for key, _ in prompt) - sum(key in recent for key, _ in prompt)
        self._lead = self._lead * max(0.0, 1 - self._undrawn / self._memory) + lead
        self._undrawn = 0
        self._rank += len(prompt)
        for key, _ in reversed(prompt):
            recent[key] = None
            recent.move_to_end(key)
        while len(recent) > self.slots:
            recent.popitem(last=False)
        for place, (key, kind) in enumerate(prompt):
            found = worthy.get(key)
            if found is None:
                self._insert(key, [kind, clock, self._rank - place, 0], worths)
            else:
                found[:3] = kind, clock, self._rank - place

    def _insert(self, key: bytes, entry: list[int], worths: Worths) -> None:
        names = self._names
        if len(names) >= self.slots:
            place = self._least(entry[1], worths)
            del self._worthy[names[place]]
            names[place] = key
            entry[3] = place
        else:
            entry[3] = len(names)
            names.append(key)
        self._worthy[key] = entry

    def _least(self, clock: int, worths: Worths) -> int:
        """Place of the one of least worth among about LOOKED_AT."""
        names, worthy = self._names, self._worthy
        stride = max(1, len(names) // LOOKED_AT)
        self._draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
        best, least, least_rank = 0, float("inf"), 0
        for name in names[(self._draw >> 8) % stride :: stride]:
            kind, since, rank, place = worthy[name]
            age = clock - since
            worth = worths[kind][(age * age).bit_length()]
            if worth < least or (worth == least and rank < least_rank):
                best, least, least_rank = place, worth, rank
        return best
