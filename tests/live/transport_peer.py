"""The other process of a transport's test: one region of known bytes, and commands on its standard input.

python transport_peer.py KIND HOST FILE SIZE        prints its description (base64), then answers
sum OFFSET SIZE → hex      fill SEED → ok      release → ok      describe → base64      quit
"""

from __future__ import annotations

import base64
import mmap
import os
import random
import sys

import xxhash

from anabranch.transfer.live.transports.choice import open_transport

REGION = "there"


def pattern(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def mapped(path: str, size: int) -> mmap.mmap:
    """A file of `size` bytes, mapped."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def main() -> None:
    kind, host, path, size = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    memory = mapped(path, size)
    memory[:] = pattern(1, size)
    transport = open_transport(kind, host=host)
    transport.register(REGION, memoryview(memory), path)
    say(base64.b64encode(transport.describe()).decode())
    for line in sys.stdin:
        match line.split():
            case ["sum", offset, count]:
                start = int(offset)
                say(f"{xxhash.xxh3_64_intdigest(memory[start : start + int(count)]):x}")
            case ["fill", seed]:
                memory[:] = pattern(int(seed), size)
                say("ok")
            case ["release"]:
                transport.release(REGION)
                say("ok")
            case ["describe"]:
                say(base64.b64encode(transport.describe()).decode())
            case _:
                break
    transport.close()
    memory.close()


def say(text: str) -> None:
    # A mark: libraries write their own lines to standard output, too.
    sys.stdout.write(f"PEER {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
