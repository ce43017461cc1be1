"""A store node behind two NICs and a client with two, each on its own host of the lab.

python multi_nic_store.py node FOLDER ADDRESS,ADDRESS       prints its address, ends with its standard input
python multi_nic_store.py client FOLDER ADDRESS TOPOLOGY    puts a value, then reads it for each line, with a report
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from transport_peer import pattern

from anabranch import Client
from anabranch.core.authentication import Access
from anabranch.store.values.config import LinkConfig, StoreConfig
from anabranch.store.values.live.node_server import ValueNode
from anabranch.transfer.live.rails import Links

SECRET = bytes(range(32))
SIZE = 32 << 20


def node(folder: Path, addresses: str) -> None:
    listen = "+".join(f"{address}:0" for address in addresses.split(","))
    # Slow enough that a cable is cut in the middle of a read.
    store = ValueNode(
        "lab",
        StoreConfig(dram_bytes=4 * SIZE, listen=listen),
        arena_path=str(folder / "arena"),
        data_dir=str(folder / "data"),
        access=Access(cluster_secret=SECRET),
        links=Links(rate_bytes=60_000_000, marks=True),
    )
    store.start()
    say(store.address)
    sys.stdin.read()
    store.stop()


def client(address: str, topology: str) -> None:
    value = pattern(3, SIZE)
    links = LinkConfig(topology=topology, marks=True)
    with Client(address, secret=SECRET, links=links, lanes=4, timeout_s=60.0) as store:
        say(store.put("value", value).name)
        buffer = bytearray(SIZE)
        for number, _ in enumerate(sys.stdin):
            buffer[:] = bytes(SIZE)
            key = f"value {number}"
            started = time.monotonic()
            say("started")
            put = store.put(key, value)
            got = store.get_into(key, buffer)
            fine = put.name == got.outcome.name == "OK" and buffer == value
            store.remove([key])
            (pool,) = store._nodes.known
            rails = {name.rpartition(" ")[2]: lanes for name, lanes in pool.rails.items() if lanes}
            say(
                json.dumps(
                    {
                        "fine": fine,
                        "put": put.name,
                        "got": got.outcome.name,
                        "s": time.monotonic() - started,
                        "rails": rails,
                    }
                )
            )


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "node":
        node(Path(sys.argv[2]), sys.argv[3])
    else:
        client(sys.argv[3], sys.argv[4])
