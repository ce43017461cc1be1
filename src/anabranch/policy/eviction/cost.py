"""Cost-aware eviction: least (worth of keeping it × time to recompute it) first. All blocks of a pool have equal bytes.

**Covers** classes of blocks, the memory of what was evicted, soft pins, the choice among leaves.
**Does not cover** what is learned (`reuse`) and the comparison with LRU (`rival`).
"""

from __future__ import annotations

from collections import OrderedDict

from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.policy.eviction.contract import Block
from anabranch.policy.eviction.lru import Lru
from anabranch.policy.eviction.reuse import BUCKETS, ReuseStatistics, age_bucket
from anabranch.policy.eviction.rival import LruRival

USES = 5  # uses are told apart up to 4
DEPTHS = 9  # depth by octaves, up to 2**8 blocks
KEYS_REMEMBERED = 8  # per slot
LOOKED_AT = 64
RUN = 8
REFRESH_AT_LEAST = 1000
FADE_AFTER = 40  # times the pool's size


class CostAware:
    """`slots`: size of the pool. `context_blocks`: a block at depth d costs 1 + d / context_blocks to recompute.

    A block's class is (uses so far, depth by octaves); a use that ends, also by eviction and return within
    KEYS_REMEMBERED × `slots` keys, teaches that class at what age it comes back. Of the least recently used leaf and at
    most LOOKED_AT others, picked by a fixed sequence, the one of least worth goes; while hits are behind LRU's, the
    least recently used. Up to RUN further blocks of the same prefix follow without another look, if they have as many
    uses and the same age. A soft pin of strength s multiplies worth by 1 + s and fades by half each time `slots` blocks
    have come. `tag` is the class, `mark` the time of the last use."""

    def __init__(self, slots: int, context_blocks: float) -> None:
        if slots < 1 or context_blocks <= 0:
            raise InvalidInput(f"eviction needs slots and a context above 0, got {slots} and {context_blocks}")
        self._slots = slots
        self._context = context_blocks
        self._reuse = ReuseStatistics(USES * DEPTHS)
        self._remembered: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        self._favours: dict[bytes, tuple[int, int]] = {}
        self._recency = Lru()
        self._rival = LruRival(slots)
        self._leaves: list[Block] = []
        self._places: dict[bytes, int] = {}
        self._refresh_at = 0
        self._fade_at = FADE_AFTER * slots
        self._draw = 1
        self._run = 0
        self._last: tuple[int, int] | None = None
        self._next: Block | None = None

    def inserted(self, block: Block, parent: Block | None, now: int) -> None:
        self._learn(now)
        self._rival.told(block.key, block.depth, hit=False)
        known = self._remembered.pop(block.key, None)
        uses = 0
        if known is not None:
            kind, since = known
            self._reuse.reused(kind, now - since)
            uses = kind // DEPTHS + 1
        self._begin(block, uses, now)

    def reused(self, block: Block, now: int) -> None:
        self._rival.told(block.key, block.depth, hit=True)
        self._reuse.reused(block.tag, now - block.mark)
        self._begin(block, block.tag // DEPTHS + 1, now)

    def favoured(self, block: Block, strength: int, now: int) -> None:
        if strength:
            self._favours[block.key] = strength, now
        else:
            self._favours.pop(block.key, None)

    def offer(self, block: Block, now: int) -> None:
        self._recency.offer(block, now)
        self._places[block.key] = len(self._leaves)
        self._leaves.append(block)
        if self._last is not None and self._run > 0 and block.key not in self._favours:
            uses, since = self._last
            if block.tag // DEPTHS == uses and abs(block.mark - since) <= RUN:
                self._next = block
        self._last = None

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
        self._run = RUN
        oldest = self._recency.victim(now)
        if self._rival.lead <= 0 and oldest.key not in self._favours:
            return oldest
        return self._least_worth(oldest, now)

    def gone(self, block: Block, *, evicted: bool, now: int) -> None:
        self._favours.pop(block.key, None)
        self._last = None
        if not evicted:
            return
        self._last = block.tag // DEPTHS, block.mark
        self._remembered[block.key] = block.tag, block.mark
        if len(self._remembered) > KEYS_REMEMBERED * self._slots:
            self._remembered.popitem(last=False)

    def _begin(self, block: Block, uses: int, now: int) -> None:
        block.tag = min(uses, USES - 1) * DEPTHS + min(block.depth.bit_length(), DEPTHS - 1)
        block.mark = now
        self._reuse.used(block.tag)

    def _learn(self, now: int) -> None:
        if now >= self._refresh_at:
            self._refresh_at = now + max(REFRESH_AT_LEAST, self._slots // 4)
            self._reuse.refresh()
        if now >= self._fade_at:
            self._fade_at = now + FADE_AFTER * self._slots
            self._reuse.fade()

    def _least_worth(self, best: Block, now: int) -> Block:
        """Of `best` and all leaves, or LOOKED_AT of them from a linear congruential sequence: the one of least worth,
        the least recently used of equals. The inner loop of eviction: worth is written out."""
        leaves, favours, worths, context = self._leaves, self._favours, self._reuse.worth, self._context
        count, draw, last = len(leaves), self._draw, BUCKETS - 1
        least = self._worth(best, now)
        everybody = count <= LOOKED_AT
        for i in range(count if everybody else LOOKED_AT):
            if everybody:
                block = leaves[i]
            else:
                draw = (draw * 1103515245 + 12345) & 0x7FFFFFFF
                block = leaves[(draw >> 8) % count]
            age = now - block.mark
            bucket = (age * age).bit_length()
            worth = worths[block.tag][bucket if bucket < last else last] * (1 + block.depth / context)
            if favours and block.key in favours:
                worth = self._worth(block, now)
            if worth < least or (worth == least and block.used < best.used):
                best, least = block, worth
        self._draw = draw
        return best

    def _worth(self, block: Block, now: int) -> float:
        worth = self._reuse.worth[block.tag][age_bucket(now - block.mark)] * (1 + block.depth / self._context)
        favour = self._favours.get(block.key)
        if favour is not None:
            strength, since = favour
            worth *= 1 + strength * 0.5 ** ((now - since) / self._slots)
        return worth
