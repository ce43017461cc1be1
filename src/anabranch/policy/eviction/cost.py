"""Cost-aware eviction: least (worth of keeping it × time to recompute it) first. All blocks of a pool have equal bytes.

**Covers** what is kept of a block's history, soft pins, the choice among leaves.
**Does not cover** what is learned (`reuse`), which blocks were asked for together (`prompts`), and the comparison with
LRU (`duel`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import log2

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.policy.eviction.contract import Block
from anabranch.policy.eviction.duel import Duel
from anabranch.policy.eviction.lru import Lru
from anabranch.policy.eviction.prompts import Prompt, Prompts
from anabranch.policy.eviction.reuse import LAST, PACES, USES, ReuseStatistics, age_bucket, kind_of

KEYS_REMEMBERED = 8  # per slot
LOOKED_AT = 64
TAKEN = 16  # one of so many that were looked at goes without another look
RUN = 16
REFRESH_AT_LEAST = 2000
FADE_AFTER = 40  # times the pool's size
OCTAVE = 16  # pace is kept in 1/16 octaves
NEWS = 3, 10  # weight of the latest gap in the pace
KIND_BITS = 16
KIND = (1 << KIND_BITS) - 1


class CostAware:
    """`slots`: size of the pool. `context_blocks`: a block at depth d costs 1 + d / context_blocks to recompute.

    A block's kind is (its *pace*: the moving average of the logarithm of the gaps between its uses, relative to the
    pool; the *growth* of the prompt that used it last: blocks in it that nobody knew, or that it was its end; its uses
    so far). Time is blocks asked for, hit or not. Evicted blocks keep their history for KEYS_REMEMBERED × `slots` keys.

    Of the least recently used leaf and at most LOOKED_AT others, picked by a fixed sequence, those of least worth go
    (1 of TAKEN); while LRU wins the duel, the least recently used. Up to RUN further blocks of the same prefix follow a
    block at once while they are worth no more than the next that would go. A soft pin of strength s multiplies worth
    by 1 + s and fades by half each time `slots` blocks have come. `tag` is pace and kind, `mark` the time of the last
    use (0: none is known)."""

    def __init__(self, slots: int, context_blocks: float) -> None:
        if slots < 1 or context_blocks <= 0:
            raise InvalidInput(f"eviction needs slots and a context above 0, got {slots} and {context_blocks}")
        self._slots = slots
        self._deeper = 1 / context_blocks
        self._slowest = int(OCTAVE * log2(slots / 16))
        self._reuse = ReuseStatistics()
        self._duel = Duel(slots)
        self._prompts = Prompts(self._ended)
        self._waiting: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._remembered: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._favours: dict[bytes, tuple[int, int]] = {}
        self._recency = Lru()
        self._leaves: list[Block] = []
        self._places: dict[bytes, int] = {}
        self._refresh_at = slots // 2
        self._fade_at = FADE_AFTER * slots
        self._draw = 1
        self._run = 0
        self._doomed: list[tuple[float, int, Block]] = []
        """The next to go, last first, with their worth and the time of their last use when they were looked at."""
        self._bound = 0.0
        """Least worth of what was looked at and spared."""
        self._evicted = False
        self._next: Block | None = None

    def inserted(self, block: Block, parent: Block | None, now: int) -> None:
        if now >= self._refresh_at:
            self._learn(now)
        block.tag, block.mark = self._remembered.pop(block.key, (0, 0))
        self._prompts.inserted(block, parent, fresh=not block.mark)

    def reused(self, block: Block, now: int) -> None:
        self._prompts.reused(block)

    def favoured(self, block: Block, strength: int, now: int) -> None:
        self._doomed.clear()
        if strength:
            self._favours[block.key] = strength, now
        else:
            self._favours.pop(block.key, None)

    def offer(self, block: Block, now: int) -> None:
        self._prompts.left(block)
        self._recency.offer(block, now)
        self._places[block.key] = len(self._leaves)
        self._leaves.append(block)
        if self._evicted and self._run > 0:
            following = self._doomed[-1][0] if self._doomed else self._bound
            if self._worth(block, now) <= following:
                self._next = block
        self._evicted = False

    def withdraw(self, block: Block) -> None:
        self._recency.withdraw(block)
        place = self._places.pop(block.key)
        last = self._leaves.pop()
        if last is not block:
            self._leaves[place] = last
            self._places[last.key] = place
        if self._next is block:
            self._next = None

    def victim(self, now: int) -> Block:
        if not self._leaves:
            raise InvariantBroken("a victim was asked for, but no block was offered")
        if self._next is not None:
            self._run -= 1
            return self._next
        oldest = self._recency.victim(now)
        if not self._duel.worth_leads and oldest.key not in self._favours:
            self._run = 0
            self._doomed.clear()
            return oldest
        self._run = RUN
        while self._doomed:
            _, since, block = self._doomed.pop()
            if block.mark == since and self._leaf(block):
                return block
        self._look(oldest, now)
        return self._doomed.pop()[2]

    def gone(self, block: Block, *, evicted: bool, now: int) -> None:
        self._prompts.left(block)
        self._favours.pop(block.key, None)
        self._evicted = evicted
        if not evicted:
            return
        self._remembered[block.key] = block.tag, block.mark
        if len(self._remembered) > KEYS_REMEMBERED * self._slots:
            self._remembered.popitem(last=False)

    def _ended(self, prompt: Prompt) -> None:
        """The blocks of a prompt get their new history; of those that the duel draws, learning hears."""
        growth = min(prompt.fresh.bit_length(), LAST - 1)
        duel, clock, end = self._duel, prompt.clock, prompt.blocks[-1]
        drawn: list[tuple[bytes, int]] = []
        before, after = (-1, -1), 0
        for block in prompt.blocks:
            if block.mark >= clock:
                continue
            if before != (block.tag, block.mark):
                before = block.tag, block.mark
                after = self._history(block, growth, clock)
            if block is end:
                after = self._history(block, LAST, clock)
            block.tag, block.mark = after, clock
            if duel.drawn(block.key):
                drawn.append((block.key, after & KIND))
        for key, kind in drawn:
            self._observe(key, kind, clock)
        duel.asked(drawn, len(prompt.blocks), clock, self._reuse.worth)

    def _history(self, block: Block, growth: int, clock: int) -> int:
        """Its tag after this use."""
        if not block.mark:
            return kind_of(0, growth, 0)
        gap = int(OCTAVE * log2(1 + clock - block.mark)) + 1
        pace = block.tag >> KIND_BITS
        if pace:
            news, of = NEWS
            gap = ((of - news) * pace + news * gap) // of
        octave = (gap - self._slowest + OCTAVE // 2) // OCTAVE
        uses = min((block.tag & KIND) % USES + 1, USES - 1)
        return gap << KIND_BITS | kind_of(1 + min(max(octave, 0), PACES - 2), growth, uses)

    def _observe(self, key: bytes, kind: int, clock: int) -> None:
        waiting = self._waiting
        before = waiting.pop(key, None)
        waiting[key] = kind, clock
        if before is not None:
            self._reuse.returned(before[0], clock - before[1])
        elif len(waiting) > (1 + KEYS_REMEMBERED) * self._duel.slots:
            _, (lost, since) = waiting.popitem(last=False)
            self._reuse.forgotten(lost, clock - since)

    def _learn(self, now: int) -> None:
        """Soon again while little is known, later each half time that the pool takes to fill."""
        self._refresh_at = now + max(1, min(max(REFRESH_AT_LEAST, self._slots // 2), now // 2))
        if now >= self._fade_at:
            self._fade_at = now + FADE_AFTER * self._slots
            self._reuse.fade()
        self._reuse.refresh(self._ages())

    def _ages(self) -> Iterator[tuple[int, int]]:
        clock = self._prompts.clock
        return ((kind, clock - since) for kind, since in self._waiting.values())

    def _leaf(self, block: Block) -> bool:
        place = self._places.get(block.key)
        return place is not None and self._leaves[place] is block

    def _look(self, oldest: Block, now: int) -> None:
        """At `oldest` and all leaves, or every so many-th of them; of equals the least recently used are doomed. The
        inner loop of eviction: worth is written out."""
        leaves, favours, worths, deeper = self._leaves, self._favours, self._reuse.worth, self._deeper
        clock = self._prompts.clock
        stride = -(-len(leaves) // LOOKED_AT)
        self._draw = (self._draw * 1103515245 + 12345) & 0x7FFFFFFF
        looked = leaves[(self._draw >> 8) % stride :: stride]
        looked.append(oldest)
        seen = [
            worths[block.tag & KIND][((age := clock - block.mark) * age).bit_length()] * (1 + block.depth * deeper)
            for block in looked
        ]
        if favours:
            for place, block in enumerate(looked):
                if block.key in favours:
                    seen[place] = self._worth(block, now)
        order = sorted(seen)
        taken = max(1, len(order) // TAKEN)
        self._bound = order[taken] if taken < len(order) else float("inf")
        least = [
            (worth, block.used, place)
            for place, (worth, block) in enumerate(zip(seen, looked, strict=True))
            if worth <= order[taken - 1]
        ]
        least.sort()
        del least[taken:]
        self._doomed = [(worth, looked[place].mark, looked[place]) for worth, _, place in reversed(least)]

    def _worth(self, block: Block, now: int) -> float:
        age = self._prompts.clock - block.mark
        worth = self._reuse.worth[block.tag & KIND][age_bucket(age)] * (1 + block.depth * self._deeper)
        favour = self._favours.get(block.key)
        if favour is not None:
            strength, since = favour
            worth *= 1 + strength * 0.5 ** ((now - since) / self._slots)
        return worth
