"""Nodes, directories and clients for tests of the value client, and what must be gone afterwards."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import anabranch
from anabranch.store.config import DirectoryConfig
from anabranch.store.live.directory_feed import AnnouncingNode
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.live.directory_server import DirectoryServer
from anabranch.store.messages import Join
from anabranch.store.outbox import Holdings
from anabranch.store.values.config import StoreConfig
from anabranch.store.values.live.node_server import ValueNode
from anabranch.testing.live.fake_value_node import FakeValueNode


def until(condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.01)


class Rig:
    """Everything is closed in the opposite order of its making."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stack = contextlib.ExitStack()
        self.directory = ""
        self.nodes: list[ValueNode] = []

    def node(self, name: str = "n", *, dram_bytes: int = 64 << 20, unix: bool = False, **settings: Any) -> ValueNode:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        node = ValueNode(
            name,
            StoreConfig(dram_bytes=dram_bytes, **{"listen": "127.0.0.1:0", **settings}),
            unix_address=f"unix:{folder}/s" if unix else "",
            arena_path=str(folder / "arena"),
            data_dir=str(folder / "data"),
        )
        node.start()
        self.nodes.append(node)
        self.stack.callback(node.stop)
        return node

    def fake(self, node_id: str = "fake", **settings: Any) -> FakeValueNode:
        node = FakeValueNode(node_id, **settings)
        self.stack.callback(node.close)
        return node

    def start_directory(self) -> DirectoryServer:
        server = DirectoryServer(DirectoryConfig(listen="127.0.0.1:0", node_ttl_s=30.0)).start()
        server.expect(set())  # else it would say "unknown" for a while
        self.stack.callback(server.stop)
        self.directory = server.address
        return server

    def announce(self, node: FakeValueNode, address: str = "") -> Callable[[], None]:
        """The directory learns what the node holds now. Returns the announcer's end."""
        held = b"".join(node.values)
        announcer = AnnouncingNode(
            Join(node_id=node.node_id, epoch=1, address=address or node.address, layout=b""),
            lambda: Holdings({"dram": held}),
            lambda: (1 << 20, 1 << 20, True),
            lambda repair: None,
            heartbeat_s=0.1,
        )
        link = DirectoryLink(self.directory, announcer)
        self.stack.callback(link.close)
        until(lambda: any(row.node_id == node.node_id for row in link.nodes()), "the node in the directory")
        until(
            lambda: all(
                node.node_id in map(itemgetter(0), link.where(held).holders(i)) for i in range(len(held) // 32)
            ),
            "its values",
        )
        return link.close

    def client(self, nodes: str | Sequence[str], **settings: Any) -> anabranch.Client:
        settings.setdefault("timeout_s", 20.0)
        client = anabranch.Client(nodes, **settings)
        self.stack.callback(client.close)
        return client


@contextlib.contextmanager
def rig(folder: Path) -> Iterator[Rig]:
    """Threads and open files are as many afterwards as before."""
    threads, files = threading.active_count(), _files()
    one = Rig(folder)
    with one.stack:
        yield one
    until(lambda: threading.active_count() <= threads, f"threads left: {threading.enumerate()}")
    until(lambda: _files() <= files, f"open files left: {_files()} instead of {files}")


def _files() -> int:
    return len(os.listdir("/proc/self/fd"))


def noise(size: int, seed: int = 0) -> bytes:
    """Bytes that differ between seeds and between places."""
    block = b"".join((seed * 1_000_003 + i).to_bytes(8, "little") for i in range(512))
    return b"".join(i.to_bytes(4, "little") + block[4:] for i in range(size // 4096 + 1))[:size]
