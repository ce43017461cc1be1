"""Where a buffer lies in memory."""

from __future__ import annotations

import ctypes
from typing import Any


class _Buffer(ctypes.Structure):
    """Py_buffer (PEP 3118)."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address_of(buffer: Any) -> int:
    """Address of the first byte, also of a read-only buffer (which ctypes' from_buffer refuses). It holds as long as
    the caller keeps the buffer."""
    raw = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(raw), 0)
    try:
        return raw.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(raw))
