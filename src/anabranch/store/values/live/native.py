"""The compiled half of `names`, `index` and `key_table`: one library, loaded at first use.

Its calls keep the interpreter's lock (they run for microseconds, giving it up and taking it back can cost
milliseconds), so each is atomic among the threads of this process.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from anabranch.core.live.native_build import load_short_calls

PACKAGE = "anabranch.store.values.live"
SOURCES = ("native.c", "key_cutter.h", "blake3_lanes.h", "key_table.h", "shared_index.h")
_P, _S, _I, _H = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
_U32, _U64, _I64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
_CALLS = {
    "names_of": (_I, (_P, _S, _P, _S, _P, _S, _P, _P)),
    "table_open": (_H, (_P,)),
    "table_close": (None, (_H,)),
    "table_count": (_U64, (_H,)),
    "table_bytes": (_U64, (_H,)),
    "table_add": (_I64, (_H, _U32, _U32, _P, _S)),
    "table_discard": (_I64, (_H, _U32, _U32, _P, _S)),
    "table_places": (None, (_H, _P, _S, _P)),
    "table_span": (_U64, (_H, _U32, _U64, _H)),
    "table_held": (_U64, (_H, _P, _U32, _U32, _P)),
    "table_sweep": (None, (_H, _P, _U32, _U32)),
    "index_open": (_H, (_I, _S, _I)),
    "index_close": (None, (_H,)),
    "index_state": (_U64, (_H,)),
    "index_count": (_U64, (_H,)),
    "index_present": (None, (_H, _P, _S, _P, _P)),
    "index_present_keys": (_I, (_H, _P, _S, _P, _S, _P, _S, _P, _P, _P)),
    "index_find": (None, (_H, _P, _S, _P, _P)),
    "index_still": (_I, (_H, _P, _U64, _U64, _U32)),
    "index_put": (_I, (_H, _P, _P, _U64, _U64, _U32)),
    "index_discard": (None, (_H, _P)),
    "index_entries": (_U64, (_H, _H, _U64, _P)),
    "index_rebuild": (_I, (_H,)),
    "index_retire": (None, (_H,)),
}

fresh_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
"""`fresh_bytes(None, size)`: a new bytes object, not yet filled, for a call to write its answer into."""


@cache
def library() -> ctypes.PyDLL | None:
    """None: use the twins. The answer is the same for the whole life of the process."""
    loaded = load_short_calls(PACKAGE, SOURCES) if sys.byteorder == "little" else None
    if loaded is not None:
        for name, (result, arguments) in _CALLS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    return loaded
