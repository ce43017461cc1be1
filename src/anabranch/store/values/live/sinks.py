"""Where the bytes of a get go: the caller's buffers, or a new bytes object that is filled before anyone sees it."""

from __future__ import annotations

import ctypes
from typing import Protocol

from anabranch.store.values.live.native import fresh_bytes
from anabranch.store.values.parts import Parts

_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]


class Sink(Protocol):
    @property
    def room(self) -> int | None:
        """Bytes that fit; None: any number."""
        ...

    def open(self, size: int) -> Parts:
        """Where a value of `size` bytes goes. May be called again after an attempt that failed."""
        ...


class BufferSink:
    """The caller's own memory."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def room(self) -> int | None:
        return self._parts.size

    def open(self, size: int) -> Parts:
        return self._parts


class BytesSink:
    """A bytes object of the value's size. `value` is valid once the get has ended well."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = b""

    @property
    def room(self) -> int | None:
        return None

    def open(self, size: int) -> Parts:
        if size == 0:
            self.value = b""
            return Parts([])
        # CPython lets a bytes object be written as long as nobody else has seen it; a bytearray would be copied again.
        self.value = fresh_bytes(None, size)
        memory = (ctypes.c_char * size).from_address(_address_of(self.value))
        memory.owner = self.value  # type: ignore[attr-defined]
        return Parts([memoryview(memory).cast("B")])
