"""A store whose directory is chosen through etcd, from the command line: the leader is killed, everything goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from store_processes import PATIENCE_S, StoreProcess, until

from anabranch.store.values.live.credentials import new_secret
from anabranch.testing.live.etcd import EtcdMembers, etcd_program


@pytest.mark.skipif(etcd_program() is None, reason="etcd is not installed (Debian: etcd-server)")
def test_a_killed_leader_is_replaced(tmp_path: Path) -> None:
    secret = str(tmp_path / "cluster.secret")
    new_secret(secret)
    proof = ["--secret-file", secret]

    def store(*arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "anabranch", "store", *arguments, "--directory", etcd.address, "--json", *proof],
            capture_output=True,
            timeout=PATIENCE_S,
            cwd=tmp_path,
        )
        return json.loads(done.stdout or b"{}")

    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdMembers(tmp_path / "etcd"))

        def start(*arguments: str) -> StoreProcess:
            process = StoreProcess(*arguments, "--listen", "127.0.0.1:0", *proof, folder=tmp_path)
            stack.callback(process.kill)
            return process

        host = etcd.address.removeprefix("etcd://")
        candidates = [start("directory", "--etcd", host, "--shard", "0/1") for _ in range(2)]
        node = start(
            "node", "--name", "n1", "--directory", etcd.address, "--dram", "4MiB", "--data-dir", str(tmp_path / "n1")
        )
        until(lambda: len(store("status")["nodes"]) == 1, "the node has joined")
        (tmp_path / "value").write_bytes(b"v")
        assert store("put", "k", str(tmp_path / "value"))["outcome"] == "ok"
        (leader,) = (one["address"] for one in store("status")["directories"])
        next(one for one in candidates if one.address == leader).kill()

        def replaced() -> bool:
            (now,) = store("status").get("directories", [{}])
            return bool(now.get("stat")) and now["address"] != leader

        until(replaced, "another candidate leads")
        until(lambda: len(store("stat", "k").get("copies", [])) == 1, "the new leader knows the value")
        assert node.stop() == 0
