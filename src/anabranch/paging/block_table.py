"""An engine's side of paging: which pages a sequence has, and who else in the engine has them.

**Covers** block tables, sharing between the choices of a request, copy-on-write decisions (PagedAttention, Kwon et al.,
SOSP 2023, §4.4), and what must be given back to the node. **Does not cover** which slots exist (`paging.pool`, at the
node) or copying (`engine.runner.ModelRunner.copy_page`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from anabranch.core.errors import InvalidInput, InvariantBroken


class CopyOrder(msgspec.Struct, frozen=True):
    """Copy the first `tokens` tokens of every layer of page `src` to page `dst`, before anything is written to either.
    With `tokens` 0 there is nothing to copy."""

    src: int
    dst: int
    tokens: int


class PageRefs:
    """Two counts per page: references that the node gave to this engine, and holders within the engine.

    Every grant is held once by whoever asked for it. When the last holder drops a page, all of its node references
    fall due at once. Raises InvariantBroken for a page that is not held.
    """

    def __init__(self) -> None:
        self._granted: dict[int, int] = {}
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        """Distinct pages held."""
        return len(self._holders)

    @property
    def granted(self) -> int:
        """References owed to the node."""
        return sum(self._granted.values())

    def grant(self, slots: Sequence[int]) -> None:
        """Each slot came from the node with one reference, and has one more holder now."""
        for slot in slots:
            self._granted[slot] = self._granted.get(slot, 0) + 1
            self._holders[slot] = self._holders.get(slot, 0) + 1

    def share(self, slot: int) -> None:
        """One more holder in the engine; the node need not know."""
        self._holders[slot] = self.holders(slot) + 1

    def drop(self, slot: int) -> int:
        """One holder fewer. Returns how many node references to give back now (0 while others hold the page)."""
        holders = self.holders(slot)
        if holders > 1:
            self._holders[slot] = holders - 1
            return 0
        del self._holders[slot]
        return self._granted.pop(slot)

    def holders(self, slot: int) -> int:
        holders = self._holders.get(slot, 0)
        if not holders:
            raise InvariantBroken(f"page {slot} is not held by this engine")
        return holders

    def held(self) -> list[int]:
        """All pages held, each once (what a restarted node must confirm)."""
        return list(self._holders)


class PageTable:
    """The pages of one sequence: page i holds positions i·block_tokens …

    The first `sealed` pages are immutable: they were found in the cache or have been published. Every page is held
    once in `refs` by this table. Methods that give pages up return a list for `KvPort.free`: one entry per node
    reference, so a slot may appear more than once.
    """

    def __init__(self, refs: PageRefs, block_tokens: int) -> None:
        if block_tokens < 1:
            raise InvalidInput(f"block_tokens must be at least 1, got {block_tokens}")
        self._refs = refs
        self._pages: list[int] = []
        self.block_tokens = block_tokens
        self.sealed = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> list[int]:
        """The table itself: changes with it; read only. Copy it into whatever outlives this step."""
        return self._pages

    def append(self, slots: Sequence[int], *, sealed: bool = False) -> None:
        """Take over the holds on `slots` (granted or shared for this table). `sealed`: they hold cached blocks.
        Raises InvariantBroken when a sealed page would follow one that is not."""
        for slot in slots:
            self._refs.holders(slot)
        if sealed and self.sealed != len(self._pages):
            raise InvariantBroken("a cached page was appended behind one that is still being written")
        self._pages.extend(slots)
        if sealed:
            self.sealed = len(self._pages)

    def seal(self, pages: int) -> None:
        """The first `pages` pages are full and have been published: they must not be written any more."""
        if not self.sealed <= pages <= len(self._pages):
            raise InvariantBroken(f"cannot seal {pages} of {len(self._pages)} pages when {self.sealed} are sealed")
        self.sealed = pages

    def missing(self, tokens: int) -> int:
        """How many more pages it takes to hold positions 0 … tokens-1."""
        return max(0, -(-tokens // self.block_tokens) - len(self._pages))

    def fork(self) -> PageTable:
        """A table of the same pages for another choice of the request; nothing is copied until one of them writes."""
        twin = PageTable(self._refs, self.block_tokens)
        for slot in self._pages:
            self._refs.share(slot)
        twin._pages = list(self._pages)
        twin.sealed = self.sealed
        return twin

    def needs_copy(self, position: int) -> bool:
        """Writing K/V of `position` would change a page that others read: it takes a fresh page first."""
        page = self._page_of(position)
        return page < self.sealed or self._refs.holders(self._pages[page]) > 1

    def replace(self, position: int, fresh: int) -> tuple[CopyOrder, list[int]]:
        """Copy on write: put `fresh` (held for this table) in place of the page that holds `position`, keeping the
        positions before it. Returns the order, and what to give back to the node once the copy has been made.

        Raises InvariantBroken if sealed pages follow (`truncate` first: they continue another text)."""
        page = self._page_of(position)
        if page < self.sealed - 1:
            raise InvariantBroken(f"position {position} lies before sealed pages")
        self._refs.holders(fresh)
        old = self._pages[page]
        self._pages[page] = fresh
        self.sealed = min(self.sealed, page)
        return CopyOrder(old, fresh, position % self.block_tokens), [old] * self._refs.drop(old)

    def truncate(self, pages: int) -> list[int]:
        """Give up all but the first `pages` pages."""
        given_up = self._pages[pages:]
        del self._pages[pages:]
        self.sealed = min(self.sealed, pages)
        return [slot for slot in reversed(given_up) for _ in range(self._refs.drop(slot))]

    def release(self) -> list[int]:
        """Give up all pages, the last one first, so that a node keeps the beginning of the prefix longest."""
        return self.truncate(0)

    def _page_of(self, position: int) -> int:
        page = position // self.block_tokens
        if not 0 <= page < len(self._pages):
            raise InvariantBroken(f"position {position} is outside the {len(self._pages)} pages of this table")
        return page
