"""What plain LRU would have hit with the same slots, from keys alone: the yardstick of what departs from it."""

from __future__ import annotations

from collections import OrderedDict

CREDIT = 8  # a policy may begin by losing 1/8 of a pool; with 1/32 it gave up too early on one trace
FORGIVEN = 1000  # one lost hit is forgiven per so many insertions
RECENT = 4  # winnings beyond 1/4 of a pool are not saved up


class LruRival:
    """The `slots` keys used last. `lead`: hits of the policy minus hits of LRU, plus a credit of slots / CREDIT and of
    one hit per FORGIVEN insertions. Who departs from recency only while `lead` is positive spends winnings and that
    credit, and no more, except for what its slots hold at the moment it turns back.

    Blocks are told in the order of their prefix; as in the pool, a prefix is used as a whole and its children are older
    than its parents. Prefixes that are told interleaved are taken for several shorter ones."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._path: list[bytes] = []
        self._depth = -1
        self._hits = 0
        self.lead = slots / CREDIT

    def told(self, key: bytes, depth: int, *, hit: bool) -> None:
        if depth <= self._depth:
            self._settle()
        self._path.append(key)
        self._depth = depth
        self._hits += hit

    def _settle(self) -> None:
        """A prefix ended."""
        known = sum(key in self._keys for key in self._path)
        forgiven = (len(self._path) - self._hits) / FORGIVEN
        self.lead = min(self.lead + self._hits - known + forgiven, self._slots / RECENT)
        for key in reversed(self._path):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._slots:
            self._keys.popitem(last=False)
        self._path = []
        self._hits = 0
