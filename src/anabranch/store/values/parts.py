"""A value as the caller has it: one buffer, or parts laid end to end.

Pure: knows buffers, not where they come from. What is sent or received is cut across parts without a copy.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import xxhash

from anabranch.core.errors import InvalidInput
from anabranch.store.values.slices import SLICE_BYTES, slice_bounds

_POINTER = re.compile("[OPX&]")
"""In a buffer's format (PEP 3118): items that are addresses of this process."""
_FIELD_NAME = re.compile(":[^:]*:")


class Parts:
    """Flat views of bytes, in order. Empty ones are left out."""

    __slots__ = ("_starts", "size", "views")

    def __init__(self, views: Sequence[memoryview]) -> None:
        if len(views) == 1:
            self.views = [views[0]]
            self.size = views[0].nbytes
            self._starts = [0, self.size]
            return
        self.views = [view for view in views if view.nbytes]
        self._starts = [0, *accumulate(view.nbytes for view in self.views)]
        self.size = self._starts[-1]

    def cut(self, start: int, end: int) -> list[memoryview]:
        """Views of the bytes `start` … `end`; both within the size."""
        if len(self.views) == 1:
            return [self.views[0][start:end]]
        starts, cut = self._starts, []
        at = bisect_right(starts, start) - 1
        while start < end:
            stop = min(end, starts[at + 1])
            cut.append(self.views[at][start - starts[at] : stop - starts[at]])
            start = stop
            at += 1
        return cut

    def slice(self, index: int, size: int) -> list[memoryview]:
        """Views of one slice of a value of `size` bytes that starts where the parts start."""
        start = index * SLICE_BYTES
        return self.cut(start, min(start + SLICE_BYTES, size))

    def sums(self) -> list[int]:
        """Slice sums of the whole value."""
        if 0 < self.size <= SLICE_BYTES:
            return [sum_of(self.views)]
        return [sum_of(self.cut(start, end)) for start, end in slice_bounds(self.size)]


def sum_of(views: Sequence[memoryview]) -> int:
    """xxh3_64 over views laid end to end; no copy is made."""
    if len(views) == 1:
        return int(xxhash.xxh3_64_intdigest(views[0]))
    digest = xxhash.xxh3_64()
    for view in views:
        digest.update(view)
    return int(digest.intdigest())


def parts_of(value: Any, *, writable: bool = False) -> Parts:
    """What a caller gave as a value or as a place for one: an object with the buffer protocol (bytes, memoryview,
    array, mmap, numpy), a contiguous CPU tensor (anything with `data_ptr`, as in torch, of any dtype), or a list or
    tuple of such parts. The bytes are used where they are: they must stay and keep still during the call.
    Raises InvalidInput for anything else, for references to objects (numpy's dtype=object), for strided buffers,
    and for read-only ones if they are to be written."""
    if isinstance(value, list | tuple):
        return Parts([_flat(part, writable) for part in value])
    return Parts([_flat(value, writable)])


def _flat(value: Any, writable: bool) -> memoryview:
    if hasattr(value, "data_ptr"):
        return _tensor(value)
    try:
        view = memoryview(value)
    except (TypeError, BufferError, ValueError) as error:
        raise InvalidInput(
            f"a value must be a buffer, a CPU tensor or a list of them, not {type(value).__name__}"
        ) from error
    if writable and view.readonly:
        raise InvalidInput(f"the {type(value).__name__} to write into is read-only")
    if not view.c_contiguous:
        raise InvalidInput("the buffer has strides; make it contiguous, or pass its contiguous parts as a list")
    if view.format == "B" and view.ndim == 1:
        return view
    if _POINTER.search(_FIELD_NAME.sub("", view.format)):
        raise InvalidInput(
            f"the {type(value).__name__} holds references to objects (format {view.format!r}), which mean nothing "
            "elsewhere; make bytes of it first"
        )
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view.cast("B")
    except TypeError:
        # Formats that memoryview does not know (explicit byte order, records): bytes are bytes.
        return memoryview(view.tobytes()) if view.readonly else _at(ctypes.c_char.from_buffer(view), view.nbytes, view)


def _tensor(value: Any) -> memoryview:
    if getattr(getattr(value, "device", None), "type", "cpu") != "cpu":
        raise InvalidInput(f"the tensor is on {value.device}; copy it to the CPU first")
    if not value.is_contiguous():
        raise InvalidInput("the tensor is not contiguous; call contiguous(), or pass its contiguous parts as a list")
    if value.nbytes == 0:
        return memoryview(b"")
    return _at(ctypes.c_char.from_address(value.data_ptr()), value.nbytes, value)


def _at(first: ctypes.c_char, size: int, owner: Any) -> memoryview:
    """`size` writable bytes from `first` on; the view keeps `owner` alive."""
    array = (ctypes.c_char * size).from_address(ctypes.addressof(first))
    array.owner = owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
