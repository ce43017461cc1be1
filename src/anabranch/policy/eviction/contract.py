"""What decides which cached block goes first.

**Covers** the contract between a pool and a policy. **Does not cover** what may go: the pool shows a policy only
*leaves* (unreferenced blocks without resident children), so children go before parents and a referenced block never
goes, whatever the policy says. **See also** `paging.prefix_tree`, the owner.
"""

from __future__ import annotations

from typing import Protocol


class Block(Protocol):
    """One named block as its pool keeps it; the policy may write `tag` and `mark`, two integers of its own, and
    nothing else. All times are the pool's clock: blocks inserted so far."""

    tag: int
    mark: int

    @property
    def key(self) -> bytes: ...
    @property
    def depth(self) -> int:
        """Blocks before it in its prefix, as far as the pool knows them."""
        ...

    @property
    def used(self) -> int:
        """When its last use ended (the last reference on it or on a descendant went)."""
        ...


class EvictionPolicy(Protocol):
    """An order among leaves. Integers and bytes only, no clock (`now` is passed in, and never falls), no chance: equal
    calls give equal answers. Every call costs O(1) or O(log n) amortised.

    The owner calls `inserted` once when a block gets its name, `reused` at each later use, `offer` when it becomes a
    leaf, `withdraw` when an offered block stops being one, `gone` when the name ends. `victim` is asked only while
    something is offered and must name an offered block; the owner then withdraws it and calls `gone`."""

    def inserted(self, block: Block, parent: Block | None, now: int) -> None: ...
    def reused(self, block: Block, now: int) -> None: ...
    def favoured(self, block: Block, strength: int, now: int) -> None:
        """A soft pin: keep it, if nothing else speaks against it, as if it were worth 1 + `strength` times as much.
        The wish fades with time; strength 0 ends it."""
        ...

    def offer(self, block: Block, now: int) -> None: ...
    def withdraw(self, block: Block) -> None: ...
    def victim(self, now: int) -> Block: ...
    def gone(self, block: Block, *, evicted: bool, now: int) -> None:
        """`evicted`: it was the victim; else its bytes were bad or its name was withdrawn."""
        ...
