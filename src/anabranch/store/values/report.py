"""What a store looks like to who looks after it (`live.administration` asks, `cli` shows)."""

from __future__ import annotations

import msgspec

from anabranch.store.messages import Stat


class NodeReport(msgspec.Struct, frozen=True):
    """A node as it answers itself. `problem`: why it does not; `stat` is then None."""

    node_id: str
    address: str
    accepts: bool = True
    stat: Stat | None = None
    problem: str = ""


class DirectoryReport(msgspec.Struct, frozen=True):
    address: str
    stat: Stat | None = None
    problem: str = ""


class StoreReport(msgspec.Struct, frozen=True):
    directories: list[DirectoryReport]
    nodes: list[NodeReport]

    @property
    def healthy(self) -> bool:
        problems = [part.problem for part in self.directories] + [part.problem for part in self.nodes]
        return bool(self.nodes) and not any(problems)


class Listed(msgspec.Struct, frozen=True):
    """One value on one node. Names are digests: a key cannot be read from them."""

    node_id: str
    name: bytes
    size: int
    scope: bytes
    tier: str
    uses: int
