"""Leased views of values: no copy where the node's memory can be seen from here."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import overload

from anabranch.core.errors import StaleLease
from anabranch.store.values.got import Got

GRACE_S = 0.2
"""A view is not given out in the last moments of its lease."""


class Views(Sequence[memoryview | None]):
    """A context manager. `views[i]` is a read-only memoryview of value i, or None if it did not come (see `got[i]`). On
    leaving, the lease goes back and every view is released: using one later raises ValueError. If something made of a
    view is still there (an array of `numpy.frombuffer(view)`, a slice of it), leaving raises BufferError, unless
    another exception is on its way: copy what shall stay, or keep the views open.

    A view is good until the lease ends, `store.lease_s` of the node (10 s, if nobody set it) after it was taken: hold
    it shorter than `left_s`, or call `renew`. It is good only while the node's process lives. After the end `views[i]`
    raises StaleLease, and bytes read since may be another value's: what was computed from them counts only if `valid`
    is still true afterwards. Copies (`zero_copy` False, the value came from another host) are good for ever.
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
        """What leaving the context does. Raises BufferError, once, if something made of a view is still there; the
        lease is over all the same."""
        if self._over:
            return
        self._over = True
        used = [
            i for i, view in enumerate(self._views) if self.zero_copy(i) and view is not None and not _released(view)
        ]
        for i in self._copied:
            with contextlib.suppress(BufferError):  # its bytes stay what they are
                self._views[i].release()  # type: ignore[union-attr]
        self._give_back()
        if used:
            raise BufferError(
                f"an array or a slice of view {used[0]} is still there, and what it shows is no longer the value for "
                "sure: copy it (e.g. array.copy()), or keep the views open for as long as it is used"
            )

    def __enter__(self) -> Views:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(*() if error is None else (BufferError,)):
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


def _released(view: memoryview) -> bool:
    """Whether nothing is left that shows the view's bytes. numpy and slices hold the exporter, not the view itself."""
    exporter = weakref.ref(view.obj)
    try:
        view.release()
    except BufferError:
        return False
    return exporter() is None
