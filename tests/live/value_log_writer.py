"""Appends to a value log until it is killed; every name that was acknowledged goes to its output.

    python value_log_writer.py FOLDER CAPACITY

For each line of its input (a seed) it forks a child that does so, and answers in words of 33 bytes: "#" and the child's
process id; "+" and a name that is durable; "?" and a name about to be removed; "-" and a name that was; "." once the
child is dead.
"""

from __future__ import annotations

import os
import random
import sys

from value_maker import made

from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.outcome import Outcome


def say(kind: bytes, *words: bytes) -> None:
    os.write(1, b"".join(kind + word.ljust(32) for word in words))  # below PIPE_BUF: whole or not at all


def append(folder: str, capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    log = ValueLog(folder, capacity, segment_bytes=4 << 20)
    while True:
        sizes = [rng.choice((64, 1000, 4096, 20_000, 65_536, 600_000)) for _ in range(rng.randint(1, 12))]
        batch = [made(rng.randbytes(28) + n.to_bytes(4, "big"), n, aligned=n % 3 == 0) for n in sizes]
        outcomes = log.append(batch, durable=True)
        done = [record.name for (record, _), outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.OK]
        say(b"+", *done)
        gone = done[: len(done) // 8]
        say(b"?", *gone)
        log.remove(gone)
        say(b"-", *gone)


def main() -> None:
    folder, capacity = sys.argv[1], int(sys.argv[2])
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            append(folder, capacity, int(line))
        say(b"#", str(child).encode())
        os.waitpid(child, 0)
        say(b".", b"")


if __name__ == "__main__":
    main()
