"""A host of the lab: holds known bytes behind two addresses, or reads them over two NICs.

python multi_nic_peer.py hold SIZE ADDRESS,ADDRESS          prints its description, ends with its standard input
python multi_nic_peer.py read SIZE DESCRIPTION TOPOLOGY     reads everything again and again, a line each time
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path

from transport_peer import pattern

from anabranch.transfer.live.rails import Links, load_topology
from anabranch.transfer.live.transports.tcp import TcpTransport
from anabranch.transfer.transport import Move, Moved

SILENCE_S = 1.0


def hold(size: int, addresses: str) -> None:
    memory = bytearray(pattern(1, size))
    # Slow enough that a cable is cut in the middle of a transfer.
    links = Links(rate_bytes=60_000_000)
    transport = TcpTransport([f"{address}:0" for address in addresses.split(",")], links=links, silence_s=SILENCE_S)
    transport.register("there", memoryview(memory))
    say(base64.b64encode(transport.describe()).decode())
    sys.stdin.read()
    transport.close()


def read(size: int, description: str, topology: str) -> None:
    links = Links(load_topology(topology), silence_s=SILENCE_S)
    transport = TcpTransport(links=links, silence_s=SILENCE_S)
    memory, truth = bytearray(size), pattern(1, size)
    transport.register("here", memoryview(memory))
    peer = transport.connect(base64.b64decode(description))
    half = size // 2
    for line in sys.stdin:
        memory[:] = bytes(size)
        started = time.monotonic()
        transfer = transport.read(peer, [Move("there", 0, "here", 0, half), Move("there", half, "here", half, half)])
        say("started")
        results = transfer.wait(float(line))
        fine = results == [Moved.OK] * 2 and memory == truth
        rails = {name.rpartition(" ")[2]: rate for name, rate in transport.rails(peer).items()}
        report = {"fine": fine, "results": [r.name for r in results], "s": time.monotonic() - started, "rails": rails}
        say(json.dumps(report))
    transport.close()


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]), sys.argv[3])
    else:
        read(int(sys.argv[2]), sys.argv[3], str(Path(sys.argv[4])))
