"""Where packs are kept: the few calls that a folder and an object store both have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Listed(msgspec.Struct, frozen=True):
    """An object; `age_s`: since it was written, by the clock of whoever keeps it and ours."""

    name: str
    age_s: float


class Objects(Protocol):
    """Calls block and are thread-safe. All raise OSError: FileNotFoundError for an object that is not there, ENOSPC or
    EDQUOT where there is no room, anything else if the store cannot be reached or refuses."""

    def put(self, name: str, parts: Sequence[memoryview]) -> None:
        """Write a new object, all of it or nothing; raises FileExistsError if the name is taken."""
        ...

    def get(self, name: str) -> bytes: ...
    def read(self, name: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Fill buffers from offsets, given in order; neighbours in one request."""
        ...

    def list(self, prefix: str) -> list[Listed]: ...
    def delete(self, names: Sequence[str]) -> None:
        """Those that are gone already are no error."""
        ...

    def close(self) -> None: ...
