"""A value node as its own process, to be killed. Arguments: folder, arena, DRAM and SSD bytes; prints its address."""

from __future__ import annotations

import os
import sys
import threading

from anabranch.core.live.process import die_with_parent
from anabranch.store.values.config import StoreConfig, WriteConfig
from anabranch.store.values.live.log.value_log import ValueLog
from anabranch.store.values.live.node_server import ValueNode


def main(folder: str, arena: str, dram: str, ssd: str) -> None:
    die_with_parent(os.getppid())
    node = ValueNode(
        "n1",
        StoreConfig(dram_bytes=int(dram), listen="127.0.0.1:0", eviction="lru"),
        WriteConfig(admission="all"),
        unix_address=f"unix:{folder}/node.sock",
        arena_path=arena,
        data_dir=f"{folder}/data",
        disk=ValueLog(f"{folder}/ssd", int(ssd)) if int(ssd) else None,
    )
    node.start()
    sys.stdout.write(node.address + "\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
