"""The store's commands against real processes: a directory and two nodes that ask for a secret."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from store_processes import StoreProcess, refused, until

from anabranch.cli.errors import run_guarded
from anabranch.cli.main import COMMANDS, cli, load
from anabranch.cluster.live.store_process import _warn_of_open, arena_path, node_folder, socket_path
from anabranch.core.authentication import Access
from anabranch.store.values.live.credentials import new_secret

Run = Callable[..., tuple[int, str, str]]


class Store:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secret = str(folder / "cluster.secret")
        new_secret(self.secret)
        self.tenants = folder / "tenants.toml"
        new_secret(str(folder / "alice.secret"))
        self.tenants.touch(mode=0o600)
        self.tenants.write_text('[alice]\nsecret_file = "alice.secret"\nquota_bytes = "8MiB"\nencrypt = true\n')
        self.directory = StoreProcess(
            "directory",
            "--listen",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
            "--tenants-file",
            str(self.tenants),
            *self.proof,
            folder=folder,
        )
        self.nodes = [self.node(name) for name in ("n1", "n2")]

    @property
    def proof(self) -> list[str]:
        return ["--secret-file", self.secret]

    def node(self, name: str, *more: str) -> StoreProcess:
        return StoreProcess(
            "node", "--name", name, "--listen", "127.0.0.1:0", "--directory", self.directory.address,
            "--dram", "32MiB", "--ssd", "32MiB", "--data-dir", str(self.folder / name), "--metrics", "127.0.0.1:0",
            "--tenants-file", str(self.tenants), "--set", f"security.keys_dir={self.folder / 'keys'}",
            *self.proof, *more, folder=self.folder,
        )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    running = Store(tmp_path_factory.mktemp("store"))
    try:
        yield running
    finally:
        for process in (*running.nodes, running.directory):
            process.kill()
        for folder in running.folder.glob("n?"):
            for left in Path("/dev/shm").glob(f"{Path(arena_path(folder)).name}*"):
                left.unlink()


@pytest.fixture
def run(store: Store, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`anabranch ARGS` in this process, as an administrator of the store."""
    monkeypatch.setenv("ANABRANCH_DIRECTORY", store.directory.address)
    monkeypatch.setenv("ANABRANCH_SECURITY_SECRET_FILE", store.secret)
    monkeypatch.chdir(store.folder)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfdbinary.readouterr()
        code = run_guarded(cli, list(arguments))
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


def test_a_value_goes_in_and_comes_out(run: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(3_000_000))
    code, _, err = run("store", "put", "file", str(tmp_path / "in"))
    assert (code, err) == (0, "file: ok, 3000000 bytes\n")
    assert json.loads(run("store", "put", "file", str(tmp_path / "in"), "--json")[1])["outcome"] == "present"
    assert run("store", "get", "file", str(tmp_path / "out"))[0] == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    (copy,) = json.loads(run("store", "stat", "file", "--json")[1])["copies"]
    assert (copy["size"], copy["tier"], copy["node_id"]) == (3_000_000, "dram", copy["node_id"])
    listed = json.loads(run("store", "ls", "--json")[1])
    assert copy["name"] in [row["name"] for row in listed]
    # A directory that has just begun says "unknown" of what nobody has announced.
    until(lambda: run("store", "rm", "file", "absent")[0] == 0, "both are known to be gone")
    assert run("store", "get", "file")[::2] == (1, "file: missing\n")
    assert run("store", "stat", "file")[:2] == (1, "file: missing\n")


def test_status_and_top_show_everybody(run: Run, store: Store) -> None:
    until(lambda: len(json.loads(run("store", "status", "--json")[1])["nodes"]) == 2, "both nodes are listed")
    code, out, _ = run("store", "status", "--json")
    report = json.loads(out)
    assert code == 0
    assert {node["node_id"] for node in report["nodes"]} == {"n1", "n2"}
    assert report["directories"][0]["stat"]["name"] == "directory"
    code, out, _ = run("store", "status")
    assert code == 0
    assert all(name in out for name in ("2 nodes; values: in memory + on SSD", "n1", "n2", "directory"))
    code, out, _ = run("top", "--once", "--json", "--interval", "0.1")
    assert code == 0
    assert {node["node_id"] for node in json.loads(out)["nodes"]} == {"n1", "n2"}
    assert "2 nodes" in run("top", "--once", "--interval", "0.1")[1]


def test_a_lone_node_is_looked_after(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_DIRECTORY")
    monkeypatch.delenv("ANABRANCH_SECURITY_SECRET_FILE")
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "in").write_bytes(b"v" * 1000)

    def start(name: str) -> tuple[StoreProcess, list[str]]:
        node = StoreProcess(
            *("node", "--name", name, "--listen", "127.0.0.1:0", "--dram", "4MiB"),
            *("--data-dir", f"./{name}"),
            folder=tmp_path,
        )
        assert run("store", "put", "k", str(tmp_path / "in"), "--node", node.address)[0] == 0
        return node, ["--node", node.address]

    node, here = start("n1")
    try:
        assert "1 node\n" in run("store", "status", *here)[1]
        out = run("top", "--once", "--interval", "0.1", *here)[1]
        assert "1 node, 1 key, in" in out
        assert len(out.splitlines()[1].split()) == 13
        code, out, err = run("store", "drain", *here, "--deadline", "1s")
        assert (code, out) == (2, "")
        assert "1 values in memory" in err
        assert "--force" in err
        node.signal(signal.SIGINT)
        assert node.wait() in (0, 130)
        assert "1 values were in memory only and are dropped; with --keep" in node.errors.read_text()
        assert "ready" not in node.errors.read_text()
        node, here = start("n2")
        code, out, _ = run("store", "drain", *here, "--deadline", "1s", "--force")
        assert (code, out.splitlines()[-1]) == (1, "drained; 1 values were left behind")
        assert node.wait() == 0
    finally:
        node.kill()
    code, out, _ = run("top", "--once", "--interval", "0.1", "--directory", "127.0.0.1:9")
    assert code == 1
    assert "directory 127.0.0.1:9: " in out


def test_metrics_beyond_this_host_are_said_to_be_open(caplog: pytest.LogCaptureFixture) -> None:
    for metrics, secret, count in (("127.0.0.1:0", b"", 0), ("10.0.0.1:0", b"x" * 32, 0), ("10.0.0.1:0", b"", 1)):
        _warn_of_open(metrics, Access(cluster_secret=secret))
        assert len(caplog.records) == count


def test_verify_and_invalidate(run: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x" * 1000)
    for epoch in ("rev-1", "rev-2"):
        assert run("store", "put", "a", str(tmp_path / "in"), "--epoch", epoch)[0] == 0
    code, out, _ = run("store", "verify", "--json")
    results = json.loads(out)
    assert code == 0
    assert sum(result["places"]["dram/good"] for result in results) >= 2
    assert sum(count for result in results for what, count in result["places"].items() if "damaged" in what) == 0
    assert "everything that was read is good" in run("store", "verify")[1]
    code, _, err = run("store", "invalidate", "--epoch", "rev-1")
    assert code == 2
    assert "add --yes" in err
    assert run("store", "invalidate", "--yes")[0] == 2
    assert run("store", "invalidate", "--epoch", "rev-1", "--yes")[0] == 0
    assert run("store", "get", "a", "--epoch", "rev-1")[0] == 1
    assert run("store", "get", "a", "--epoch", "rev-2")[1] == "x" * 1000


def test_who_does_not_prove_it_gets_nothing(run: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"of alice")
    as_alice = ("--tenant", "alice", "--secret-file", str(store.folder / "alice.secret"))
    assert run("store", "put", "mine", str(tmp_path / "in"), *as_alice) == (0, "", "mine: ok, 8 bytes\n")
    assert run("store", "get", "mine", *as_alice)[1] == "of alice"
    assert run("store", "get", "mine")[0] == 1
    as_bob = ("--tenant", "bob", *as_alice[2:])
    code, out, err = run("store", "get", "mine", *as_bob)
    assert code != 0
    assert out == ""
    assert "does not open tenant 'bob'" in err
    for call in (("ls",), ("verify",), ("stat", "mine"), ("drain", "--node", store.nodes[0].address)):
        code, out, err = run("store", *call, *as_alice)
        assert code != 0, call
        assert "n1  dram" not in out
    stranger = tmp_path / "other.secret"
    new_secret(str(stranger))
    code, _, err = run("store", "status", "--secret-file", str(stranger))
    assert code == 1
    code, _, err = run("store", "get", "mine", "--node", store.nodes[0].address, "--secret-file", str(stranger))
    assert code == 2
    assert "does not open" in err


def on_disk(store: Store, what: bytes) -> bool:
    files = [path for node in ("n1", "n2") for path in (store.folder / node).rglob("*") if path.is_file()]
    return any(what in path.read_bytes() for path in files)


def test_an_encrypted_tenant_leaves_nothing_readable_on_disk(run: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"a secret of alice's " * 50)
    (tmp_path / "plain").write_bytes(b"nobody's secret " * 50)
    as_alice = ("--tenant", "alice", "--secret-file", str(store.folder / "alice.secret"))
    assert run("store", "put", "sealed", str(tmp_path / "in"), "--durable", *as_alice)[0] == 0
    assert run("store", "put", "plain", str(tmp_path / "plain"), "--durable")[0] == 0
    assert on_disk(store, b"nobody's secret")
    assert not on_disk(store, b"secret of alice")
    keys = {path.name: path.read_bytes() for path in (store.folder / "keys").glob("*.key")}
    code, out, _ = run("store", "invalidate", "--all", "--yes", "--json", *as_alice)
    assert code == 0, out
    assert {"n1/keys", "n2/keys"} <= set(json.loads(out)["places"])
    assert run("store", "get", "sealed", *as_alice)[0] == 1
    assert run("store", "get", "plain")[0] == 0
    changed = [name for name, data in keys.items() if (store.folder / "keys" / name).read_bytes() != data]
    assert changed, "the tenant has another key now"
    # It goes on under its new key.
    assert run("store", "put", "sealed", str(tmp_path / "in"), "--durable", *as_alice)[0] == 0
    assert not on_disk(store, b"secret of alice")


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_metrics_and_health(run: Run, store: Store) -> None:
    for process in (store.directory, *store.nodes):
        assert get(process.metrics, "/healthz") == (200, "ok\n")
        assert get(process.metrics, "/livez") == (200, "ok\n")
        assert get(process.metrics, "/other")[0] == 404
    status, page = get(store.nodes[0].metrics, "/metrics")
    assert status == 200
    assert "# HELP anabranch_node_items_total Items whose outcome is known" in page
    assert "# TYPE anabranch_node_used_bytes gauge" in page
    assert (
        "# HELP anabranch_directory_keys Keys in the directory's table." in get(store.directory.metrics, "/metrics")[1]
    )


def test_a_killed_node_has_its_values_again(run: Run, store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"y" * 100_000)
    node = store.node("n4")
    try:
        assert run("store", "put", "kept", str(tmp_path / "in"), "--node", node.address)[0] == 0
    finally:
        node.kill()
    node = store.node("n4")
    try:
        copies = json.loads(run("store", "stat", "kept", "--json", "--node", node.address)[1])["copies"]
        assert "n4" in {copy["node_id"] for copy in copies}
        node.signal(signal.SIGINT)
        assert node.wait() == 130
    finally:
        node.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["node", "--dram", "lots"], "expected a size such as"),
        (["node", "--dram", "1PB"], "unknown size unit"),
        (["node", "--set", "store.dramm_bytes=1"], "did you mean 'dram_bytes'?"),
        (["node", "--listen", "nowhere"], "expected host:port"),
        (["node", "--ssd-dir", "/x"], "store.ssd_bytes = 0"),
        (["node", "--tls-cert", "a.pem"], "TLS needs tls_cert, tls_key and tls_ca"),
        (["node", "--set", "write.admission=perhaps"], "expected one of second-use"),
        (["directory", "--shard", "2"], "expected I/N"),
        (["directory", "--shard", "2/2"], "directory.shard = 2: there are 2 shards"),
        (["store", "invalidate", "--yes"], "--epoch NAME"),
        (["store", "invalidate", "--epoch", "", "--yes"], "--default-epoch"),
        (["store", "invalidate", "--all", "--default-epoch", "--yes"], "say what"),
        (["node", "--set", "node.dram_bytes=64MiB"], "no effect here; say store.dram_bytes"),
        (["store", "status", "--set", "engine.block_tokens=1"], "section engine is of `anabranch up`"),
        (["store", "drain"], "name the node that shall leave"),
        (["store", "verify", "--wait", "soon"], "expected a duration"),
        (["store", "secret", "new", "/"], "exists"),
    ],
)
def test_what_cannot_be_is_one_clear_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(cli, arguments) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["node", "--listen", "0.0.0.0:0", "--dram", "9000TiB"], 2, "set security.secret_file"),
        (["node", "--dram", "9000TiB", "--listen", "127.0.0.1:0"], 2, "does not fit /dev/shm"),
        (["node", "--secret-file", "absent"], 2, "security.secret_file absent: No such file"),
        (["node", "--metrics", "nowhere", "--listen", "127.0.0.1:0", "--dram", "1MiB"], 2, "expected host:port"),
        (["directory", "--listen", "192.0.2.1:1", "--secret-file", "s"], 1, "cannot listen on 192.0.2.1:1"),
    ],
)
def test_what_the_machine_refuses_is_one_clear_line(
    arguments: list[str], code: int, words: str, tmp_path: Path
) -> None:
    new_secret(str(tmp_path / "s"))
    got, err = refused(*arguments, folder=tmp_path)
    assert got == code, err
    assert words in err
    assert "Traceback" not in err


def test_a_relative_data_folder_is_told_to_clients_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert node_folder("n1", "./a") == tmp_path.resolve() / "a"
    assert os.path.isabs(socket_path(node_folder("n1", "a")))


def test_signals_that_come_together_end_it(tmp_path: Path) -> None:
    """The second may interrupt the handler of the first."""
    directory = StoreProcess("directory", "--listen", "127.0.0.1:0", folder=tmp_path)
    directory.signal(signal.SIGTERM)
    directory.signal(signal.SIGINT)
    assert directory.wait() in (0, 130)


# --- the examples of --help -----------------------------------------------------------------------------------------


def pages() -> list[str]:
    store = load(COMMANDS["store"])
    assert isinstance(store, click.Group)
    return ["directory", "node", "top", "store", *(f"store {name}" for name in store.commands if name != "secret"),
            "store secret new"]  # fmt: skip


def example(name: str) -> str:
    command = load(COMMANDS[name.split()[0]])
    for word in name.split()[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    found = re.findall(r"`((?:echo [^`|]+\| )?anabranch [^`]+)`", command.epilog or "")
    assert found, f"{name} has no example"
    assert command.help
    return str(found[0])


def test_examples_of_servers_start(tmp_path: Path) -> None:
    """With any free port instead of the one in the text."""
    line = re.sub(r":70[67]0", ":0", example("directory"))
    directory = StoreProcess(*line.split()[1:], folder=tmp_path)
    line = example("node").replace("--directory 127.0.0.1:7060", f"--directory {directory.address}")
    node = StoreProcess(*line.replace(":7070", ":0").replace("4GiB", "4MiB").split()[1:], folder=tmp_path)
    assert node.stop() == 0
    assert directory.stop() == 0


def test_examples_of_the_store_run(run: Run, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    order = ["store status", "store put", "store get", "store stat", "store ls", "store verify", "store rm", "top",
             "store invalidate", "store secret new", "store drain"]  # fmt: skip
    assert set(order) == set(pages()) - {"directory", "node", "store"}
    leaving = store.node("n5")
    try:
        for name in order:
            line = example(name)
            if line.startswith("echo "):
                (store.folder / "greeting").write_text("hello\n")
                line = line.partition("| ")[2].replace(" -", f" {store.folder / 'greeting'}")
            line = line.replace("127.0.0.1:7070", leaving.address).replace(" cluster.secret", " another.secret")
            code, out, err = run(*line.split()[1:])
            assert code == 0, f"{line}: {out}{err}"
            assert out or err
        assert (store.folder / "another.secret").exists()
    finally:
        leaving.kill()


def test_every_group_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["store"], ["store", "secret"]):
        assert run_guarded(cli, [*words, "--help"]) == 0
        assert "Usage: anabranch" in capsys.readouterr().out
