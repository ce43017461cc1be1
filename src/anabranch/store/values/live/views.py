"""Leased views of values: no copy where the node's memory can be seen from here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import overload

from anabranch.core.errors import StaleLease
from anabranch.store.values.got import Got

GRACE_S = 0.2
"""A view is not given out in the last moments of its lease."""


class Views(Sequence[memoryview | None]):
    """A context manager. `views[i]` is a read-only memoryview of value i, or None if it did not come (see `got[i]`). On
    leaving, the lease goes back and every view is released: using one later raises ValueError.

    A view is good until the lease ends: hold it shorter than `left_s`, or call `renew`. After the end `views[i]` raises
    StaleLease, and bytes read since may be another value's: what was computed from them counts only if `valid` is still
    true afterwards (it is not after the node's death, either). Copies (`zero_copy` False, the value came from another
    host) are good for ever.
    """

    def __init__(
        self,
        got: list[Got],
        views: list[memoryview | None],
        *,
        copied: set[int],
        ends: float,
        give_back: Callable[[], None],
        renew: Callable[[], float | None],
        alive: Callable[[], bool],
    ) -> None:
        self.got = got
        self._views = views
        self._copied = copied
        self._ends = ends
        self._give_back, self._renew, self._alive = give_back, renew, alive
        self._over = False

    @property
    def left_s(self) -> float:
        """Seconds for which the views are good."""
        return self._ends - time.monotonic()

    @property
    def valid(self) -> bool:
        """Everything that was read from any view so far was the value's."""
        if self._over or len(self._copied) == sum(view is not None for view in self._views):
            return not self._over
        return self.left_s > 0 and self._alive()

    def zero_copy(self, i: int) -> bool:
        return self._views[i] is not None and i not in self._copied

    def renew(self) -> float:
        """Prolong the lease; `left_s` from now on. Raises StaleLease if it has ended or the node does not give
        another."""
        ends = self._renew() if self.valid else None
        if ends is None:
            raise StaleLease("the lease of these views cannot be prolonged; acquire them again")
        self._ends = ends
        return self.left_s

    def release(self) -> None:
        """What leaving the context does."""
        if self._over:
            return
        self._over = True
        for view in self._views:
            if view is not None:
                # A view that the caller made of this view stays; what it shows is no longer promised.
                with contextlib.suppress(BufferError):
                    view.release()
        self._give_back()

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, i: int) -> memoryview | None: ...
    @overload
    def __getitem__(self, i: slice) -> list[memoryview | None]: ...
    def __getitem__(self, i: int | slice) -> memoryview | list[memoryview | None] | None:
        if isinstance(i, slice):
            return [self[at] for at in range(*i.indices(len(self._views)))]
        view = self._views[i]
        if self._over:
            raise StaleLease("the views were given back")
        if view is not None and i % len(self._views) not in self._copied and self.left_s < GRACE_S:
            raise StaleLease("the lease has ended, or is about to; renew it in time, or acquire the values again")
        return view

    def __iter__(self) -> Iterator[memoryview | None]:
        return (self[i] for i in range(len(self._views)))
