"""Scale of the metadata: memory and look-up time of a full directory, its rebuild after a kill, and eviction time.

    python benchmarks/directory_scale.py [--quick] [--keys N]

One directory process; synthetic nodes announce over loopback TCP as real ones do. Look-ups of 512 names leave on a
fixed schedule (200 a second, beside 40 announcements of 512 names a second) and are timed from when they were due.
Beside it stands what the same bytes, on the same schedule, take to a process that only echoes: how busy the machine
is. With etcd
installed, the leader of two is killed with SIGKILL and the time until every key is found again is taken. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch.core.errors import Unavailable
from anabranch.core.live.link import connect
from anabranch.core.wire import encode
from anabranch.paging.pool import SlotPool
from anabranch.policy.eviction.choice import eviction_policy
from anabranch.store.config import DirectoryConfig, NodeConfig
from anabranch.store.live.directory_feed import AnnouncingNode
from anabranch.store.live.directory_link import DirectoryLink
from anabranch.store.messages import Announce, Join
from anabranch.store.outbox import Holdings
from anabranch.testing.live.etcd import EtcdMembers, etcd_program

NAME = 32
LOOKUP = 512
LOOKUPS_A_SECOND = 200
WRITES_A_SECOND = 40
CHAIN = 16
TARGETS = {"bytes_a_key": 200, "lookup_p99_ms": 2.0, "rebuild_s": 10.0, "eviction_growth": 3.0, "leader_change_s": 2.0}


class DirectoryProcess:
    def __init__(self, listen: str = "127.0.0.1:0", etcd: str = "") -> None:
        command = [sys.executable, __file__, "--member", listen, "--etcd", etcd]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def holder(name: str, address: str, names: bytes) -> DirectoryLink:
    join = Join(node_id=name, epoch=1, address=f"{name}:1", layout=b"")
    return DirectoryLink(address, AnnouncingNode(join, lambda: Holdings({"dram": names})))


def wait(condition: Callable[[], bool], seconds: float = 600.0) -> float:
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > seconds:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.005)
    return time.perf_counter() - began


def missing(link: DirectoryLink, names: bytes) -> int:
    """How many of the names it cannot place; all of them while nobody answers."""
    try:
        return len(names) // NAME - link.where(names, timeout_s=5.0).known().count(True)
    except Unavailable:
        return len(names) // NAME


def sample(names: bytes, at: int, count: int = LOOKUP) -> bytes:
    start = at * 7919 % (len(names) // NAME - count) * NAME
    return names[start : start + count * NAME]


def spread_sample(names: bytes) -> bytes:
    """Some of each part, the last ones included."""
    total = len(names) // NAME
    return b"".join(names[i * NAME : (i + 1) * NAME] for i in [*range(0, total, max(1, total // 4000)), total - 1])


# --- a full directory -----------------------------------------------------------------------------------------------


def full_directory(keys: int, seconds: float) -> dict[str, Any]:
    directory = DirectoryProcess()
    nodes = 4
    shares = [os.urandom(keys // nodes * NAME) for _ in range(nodes)]
    empty = directory.resident_bytes
    began = time.perf_counter()
    links = [holder(f"n{i}", directory.address, share) for i, share in enumerate(shares)]
    asker = DirectoryLink(directory.address)
    probe = b"".join(spread_sample(share) for share in shares)
    try:
        wait(lambda: all(link.joined for link in links) and missing(asker, probe) == 0)
        announced_s = time.perf_counter() - began
        growth = directory.resident_bytes - empty
        exists = [exists_speed(asker, shares[0]) for _ in range(3)]
        latencies = lookups(asker, directory.address, shares[1], seconds)
        plain = echoes(shares[1], seconds / 2)
    finally:
        for link in [asker, *links]:
            link.close()
        directory.kill()
    return {
        "keys": keys,
        "announced_keys_a_second": round(keys / announced_s),
        "bytes_a_key": round(growth / keys, 1),
        "exists_keys_a_second": round(statistics.median(exists)),
        "lookup_p50_ms": round(percentile(latencies, 0.5), 3),
        "lookup_p99_ms": round(percentile(latencies, 0.99), 3),
        "echo_p50_ms": round(percentile(plain, 0.5), 3),
        "echo_p99_ms": round(percentile(plain, 0.99), 3),
        "lookups": len(latencies),
    }


def exists_speed(link: DirectoryLink, names: bytes, seconds: float = 1.0) -> float:
    asked, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        asked += len(link.where(sample(names, asked, 1000)).known())
    return asked / spent


def lookups(link: DirectoryLink, address: str, names: bytes, seconds: float) -> list[float]:
    """Milliseconds from when each was due."""
    done = threading.Event()
    writer = threading.Thread(target=write, args=(address, done))
    writer.start()

    def ask(i: int) -> None:
        found = link.where(sample(names, i), run=True)
        if len(found) != LOOKUP:
            raise RuntimeError(f"found {len(found)} of {LOOKUP} names that are there")

    latencies = on_schedule(ask, seconds)
    done.set()
    writer.join()
    return latencies


def on_schedule(ask: Callable[[int], None], seconds: float) -> list[float]:
    latencies, began = [], time.perf_counter() + 0.5
    for i in range(int(seconds * LOOKUPS_A_SECOND)):
        due = began + i / LOOKUPS_A_SECOND
        time.sleep(max(0.0, due - time.perf_counter()))
        ask(i)
        latencies.append((time.perf_counter() - due) * 1e3)
    return latencies


def echoes(names: bytes, seconds: float) -> list[float]:
    """The same bytes to a process that does nothing with them, and as many back as a directory answers."""
    listener = socket.create_server(("127.0.0.1", 0))
    code = (
        "import socket,sys\n"
        "s=socket.create_connection(('127.0.0.1',int(sys.argv[1])));n=int(sys.argv[2])\n"
        "s.setsockopt(6,1,1);b=bytearray(n)\n"
        "while s.recv_into(b,n,socket.MSG_WAITALL): s.sendall(b[:n//4])\n"
    )
    size = LOOKUP * NAME
    with subprocess.Popen([sys.executable, "-c", code, str(listener.getsockname()[1]), str(size)]):
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = bytearray(size // 4)

        def ask(i: int) -> None:
            sock.sendall(sample(names, i))
            sock.recv_into(back, size // 4, socket.MSG_WAITALL)

        latencies = on_schedule(ask, seconds)
        sock.close()
    listener.close()
    return latencies


def write(address: str, done: threading.Event) -> None:
    """Announcements of LOOKUP names that come, and go two seconds later."""
    sock = connect(address)
    sock.sendall(encode(Join(node_id="writer", epoch=1, address="writer:1", layout=b"")))
    sock.sendall(encode(Announce(seq=1, reset=True)))
    held: list[bytes] = []
    seq = 1
    while not done.wait(1 / WRITES_A_SECOND):
        seq += 1
        held.append(os.urandom(LOOKUP * NAME))
        gone = {"dram": held.pop(0)} if len(held) > 2 * WRITES_A_SECOND else {}
        sock.sendall(encode(Announce(seq=seq, added_names={"dram": held[-1]}, removed_names=gone)))
    sock.close()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# --- a killed directory ---------------------------------------------------------------------------------------------


def rebuild(keys: int) -> dict[str, Any]:
    directory = DirectoryProcess()
    shares = [os.urandom(keys // 2 * NAME) for _ in range(2)]
    links = [holder(f"n{i}", directory.address, share) for i, share in enumerate(shares)]
    asker = DirectoryLink(directory.address)
    probe = b"".join(spread_sample(share) for share in shares)
    absent = os.urandom(NAME)
    try:
        wait(lambda: missing(asker, probe) == 0)
        directory.kill()
        began = time.perf_counter()
        address = directory.address
        directory = DirectoryProcess(address)
        first_found = complete = sure = 0.0
        wrong = asked = 0
        while not sure:
            time.sleep(0.005)
            try:
                known = asker.where(probe + absent, timeout_s=5.0).known()
            except Unavailable:
                continue
            spent = time.perf_counter() - began
            asked += 1
            wrong += known[:-1].count(False)
            first_found = first_found or (spent if True in known else 0.0)
            complete = complete or (spent if all(known[:-1]) else 0.0)
            sure = spent if known[-1] is False else 0.0
    finally:
        for link in [asker, *links]:
            link.close()
        directory.kill()
    return {
        "keys": keys,
        "first_found_s": round(first_found, 3),
        "rebuild_s": round(complete, 3),
        "absence_certain_s": round(sure, 3),
        "wrongly_absent": wrong,
        "lookups_meanwhile": asked,
    }


def leader_changes(rounds: int) -> list[float]:
    """Seconds from SIGKILL of the leader until another one finds every key."""
    names = os.urandom(100_000 * NAME)
    probe = spread_sample(names)
    with tempfile.TemporaryDirectory(prefix="anabranch-directory-") as folder, EtcdMembers(Path(folder)) as etcd:
        candidates = [DirectoryProcess(etcd=etcd.address) for _ in range(2)]
        links = [DirectoryLink(etcd.address), holder("n", etcd.address, names)]
        seconds = []
        try:
            for _ in range(rounds):
                wait(lambda: missing(links[0], probe) == 0, 60.0)
                leader = next(c for c in candidates if c.address in links[0]._shards())
                leader.kill()
                candidates.remove(leader)
                seconds.append(wait(lambda: missing(links[0], probe) == 0, 60.0))
                candidates.append(DirectoryProcess(etcd=etcd.address))
        finally:
            for link in links:
                link.close()
            for candidate in candidates:
                candidate.kill()
    return seconds


# --- eviction -------------------------------------------------------------------------------------------------------


def eviction_time(entries: int, evictions: int = 20_000) -> float:
    """Microseconds to evict a block from a full pool with the default policy; prompts of CHAIN blocks."""
    pool = SlotPool(entries, eviction_policy(NodeConfig().eviction, entries, 8192.0))
    parent, at = b"", 0

    def fill(count: int) -> float:
        nonlocal parent, at
        began = time.perf_counter()
        slots = pool.reserve(count)
        spent = time.perf_counter() - began
        if slots is None:
            raise RuntimeError("nothing could be evicted")
        for slot in slots:
            key = at.to_bytes(NAME, "big")
            pool.commit(slot, key, b"" if at % CHAIN == 0 else parent)
            parent, at = key, at + 1
        for slot in slots:
            pool.unref(slot)
        return spent

    for _ in range(entries // CHAIN):
        fill(CHAIN)
    pool.drain_evicted()
    spent = sum(fill(CHAIN) for _ in range(evictions // CHAIN))
    return spent / len(pool.drain_evicted()) * 1e6


def member(listen: str, etcd: str) -> None:
    from anabranch.store.live.directory_server import run_directory

    run_directory(DirectoryConfig(listen=listen, etcd=etcd), ready=lambda server: print(server.address, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 million keys in the directory, fewer samples")
    parser.add_argument("--keys", type=int, default=0, help="keys in the directory  [default: 10 million]")
    parser.add_argument("--member", help=argparse.SUPPRESS)
    parser.add_argument("--etcd", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.member:
        member(args.member, args.etcd)
        return
    full = full_directory(args.keys or (1_000_000 if args.quick else 10_000_000), 5.0 if args.quick else 30.0)
    print("full directory:", full)
    rebuilt = rebuild(1_000_000)
    print("rebuild:", rebuilt)
    changes = leader_changes(2 if args.quick else 5) if etcd_program() else []
    print("leader changes:", [round(value, 2) for value in changes] or "not measured: etcd is not installed")
    evictions = {str(entries): round(eviction_time(entries), 2) for entries in (10_000, 100_000, 1_000_000)}
    growth = round(evictions["1000000"] / evictions["10000"], 2)
    print("eviction, µs a block:", evictions)
    ours = {
        "bytes_a_key": full["bytes_a_key"],
        "lookup_p99_ms": full["lookup_p99_ms"],
        "rebuild_s": rebuilt["rebuild_s"],
        "eviction_growth": growth,
        "leader_change_s": round(max(changes), 2) if changes else None,
    }
    result = {
        "claim": "metadata at scale: bytes of resident memory a key, p99 of 512-key look-ups beside writes, rebuild of "
        "a million keys, growth of eviction time from 10^4 to 10^6 entries, service after a leader's SIGKILL",
        "ours": ours,
        "limit": TARGETS,
        "met": {name: value is not None and value <= TARGETS[name] for name, value in ours.items()},
        "peer": {"echo_p99_ms": full["echo_p99_ms"]},
        "full": full,
        "rebuild": rebuilt,
        "leader_changes_s": [round(value, 3) for value in changes],
        "eviction_us_a_block": evictions,
        "samples": {"lookups": full["lookups"], "leader_changes": len(changes), "evictions": 20_000},
        "quick": args.quick,
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "platform": platform.platform()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
