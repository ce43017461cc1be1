"""The scopes and invalidations that a node must know again after a restart: one small file, a line each.

A line is written before what it says takes effect, and reaches the disk when it invalidates.
"""

from __future__ import annotations

import contextlib
import os

import msgspec

from anabranch.store.values.scope import Scope


class ScopeLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A scope by its names; or the digest (hex) of a scope of which nothing up to `generation` may be found."""

    tenant: str = ""
    namespace: str = ""
    epoch: str = ""
    dead: str = ""
    generation: int = 0


class ScopeFile:
    """`scopes`: all that were ever opened. `dead`: digest → highest generation that was invalidated."""

    def __init__(self, path: str) -> None:
        self.scopes: dict[Scope, None] = {}
        self.dead: dict[bytes, int] = {}
        decoder = msgspec.json.Decoder(ScopeLine)
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            for line in file:
                # A torn last line is what was not said; a line that is not ours says nothing.
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    self._read(decoder.decode(line))
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._write_all()
        os.lseek(self._fd, 0, os.SEEK_END)

    def opened(self, scope: Scope) -> None:
        if scope not in self.scopes:
            self.scopes[scope] = None
            self._append([ScopeLine(scope.tenant, scope.namespace, scope.epoch)])

    def invalidated(self, digests: list[bytes], generation: int) -> None:
        """When this returns it survives a crash of the machine."""
        for digest in digests:
            self.dead[digest] = generation
        self._append([ScopeLine(dead=digest.hex(), generation=generation) for digest in digests])
        os.fdatasync(self._fd)

    def close(self) -> None:
        os.close(self._fd)

    def _read(self, line: ScopeLine) -> None:
        if line.dead:
            digest = bytes.fromhex(line.dead)
            self.dead[digest] = max(self.dead.get(digest, 0), line.generation)
        else:
            self.scopes[Scope(line.tenant, line.namespace, line.epoch)] = None

    def _write_all(self) -> None:
        """Without repetitions and torn lines."""
        lines = [ScopeLine(s.tenant, s.namespace, s.epoch) for s in self.scopes]
        lines += [ScopeLine(dead=digest.hex(), generation=generation) for digest, generation in self.dead.items()]
        data = _encoded(lines)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def _append(self, lines: list[ScopeLine]) -> None:
        os.write(self._fd, _encoded(lines))


def _encoded(lines: list[ScopeLine]) -> bytes:
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
