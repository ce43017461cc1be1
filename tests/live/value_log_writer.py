"""A process that appends to a value log until it is killed; every name that was acknowledged goes to its output.

python value_log_writer.py FOLDER CAPACITY SEED
"""

from __future__ import annotations

import os
import random
import sys

from value_maker import made

from anabranch.store.values.live.log import ValueLog
from anabranch.store.values.outcome import Outcome


def main() -> None:
    folder, capacity, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    log = ValueLog(folder, capacity, segment_bytes=4 << 20)
    os.write(1, b"ready!!!")
    while True:
        sizes = [rng.choice((64, 1000, 4096, 20_000, 65_536, 600_000)) for _ in range(rng.randint(1, 12))]
        batch = [made(rng.randbytes(28) + n.to_bytes(4, "big"), n, aligned=n % 3 == 0) for n in sizes]
        outcomes = log.append(batch, durable=True)
        done = [record.name for (record, _), outcome in zip(batch, outcomes, strict=True) if outcome is Outcome.OK]
        gone = done[: len(done) // 8]
        log.remove(gone)
        os.write(1, b"".join([b"+" + name for name in done] + [b"-" + name for name in gone]))


if __name__ == "__main__":
    main()
