"""What plain LRU would have hit with the same slots, from keys alone: the yardstick of what departs from it."""

from __future__ import annotations

from collections import OrderedDict

CREDIT = 8  # a policy may begin by losing 1/8 of a pool
FORGIVEN = 1000  # one lost hit is forgiven per so many insertions
RECENT = 4  # winnings beyond 1/4 of a pool are not saved up


class LruRival:
    """A list of the `slots` keys used last. `lead`: hits of the policy minus hits of LRU, plus a credit of
    slots / CREDIT and of one hit per FORGIVEN insertions. Who departs from recency only while `lead` is positive
    spends winnings and that credit, and no more, except for what its slots hold at the moment it turns back.

    Children-first LRU keeps heads of prefixes where a plain list keeps tails; the numbers of blocks agree.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.lead = slots / CREDIT

    def missed(self, key: bytes) -> None:
        self.lead += 1 / FORGIVEN - self._touch(key)

    def hit(self, key: bytes) -> None:
        self.lead = min(self.lead + 1 - self._touch(key), self._slots / RECENT)

    def _touch(self, key: bytes) -> int:
        known = key in self._keys
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._slots:
            self._keys.popitem(last=False)
        return int(known)
