"""Which items of a batch travel in one request.

Small values go together, their bytes behind the request or its answer. Large ones are cut into slices, and offered or
leased in waves, so that a batch larger than a node's memory still goes through.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from anabranch.store.values.messages import INLINE_BYTES, MAX_ITEMS

WAVE_BYTES = 64 << 20
SMALL_TOGETHER = 256
"""Small items of one request: while the node works at one the sender prepares the next."""
UNKNOWN_TOGETHER = 16
"""Items of unknown size that are asked for at once."""


class Group(msgspec.Struct, frozen=True):
    """Consecutive items; `inline`: their bytes travel with the message."""

    first: int
    count: int
    inline: bool

    @property
    def items(self) -> range:
        return range(self.first, self.first + self.count)


def group(
    sizes: Sequence[int | None], *, inline_bytes: int = INLINE_BYTES, together_bytes: int = INLINE_BYTES
) -> list[Group]:
    """Cover all items, in order. `sizes`: at most as many bytes; None: unknown (then tried inline). Items of at most
    `inline_bytes` are inline, as many in a group as `together_bytes` hold, at least one."""
    groups: list[Group] = []
    first, total, inline = 0, 0, True
    for i, size in enumerate(sizes):
        weight = INLINE_BYTES // UNKNOWN_TOGETHER if size is None else size
        small = weight <= inline_bytes
        limit = together_bytes if small else WAVE_BYTES
        most = SMALL_TOGETHER if small else MAX_ITEMS
        if i > first and (small != inline or total + weight > limit or i - first >= most):
            groups.append(Group(first, i - first, inline))
            first, total = i, 0
        inline = small
        total += weight
    if sizes:
        groups.append(Group(first, len(sizes) - first, inline))
    return groups
