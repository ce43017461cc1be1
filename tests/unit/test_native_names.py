"""Names of many keys at once: the compiled call, its twin and the official BLAKE3 agree on keys and errors."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest
from blake3 import blake3

from anabranch.core.errors import InvalidInput
from anabranch.core.live import native_build
from anabranch.store.values.live.names import joined, joined_by_size, names_in_python, names_of
from anabranch.store.values.live.native import PACKAGE, SOURCES, library
from anabranch.store.values.scope import MAX_KEY_BYTES, NAME_BYTES, Key, Scope, name_of

NAME_KEY = Scope("acme", "kv", "r1").name_key(b"salt")
SEPARATOR = joined([b"x", b"y"]).separator
COMPILER = shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def official(keys: Sequence[Key]) -> bytes:
    return b"".join(blake3(k.encode() if isinstance(k, str) else k, key=NAME_KEY).digest() for k in keys)


@needs_compiler
@pytest.mark.skipif(os.environ.get(native_build.SWITCH) == "0", reason="switched off")
def test_the_compiled_library_is_in_use_where_there_is_a_compiler() -> None:
    assert library() is not None


@needs_compiler
def test_the_c_compiles_without_a_warning() -> None:
    with resources.as_file(resources.files(PACKAGE).joinpath(SOURCES[0])) as path:
        command = [str(COMPILER), "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_length_of_a_key() -> None:
    chance = random.Random(1)
    keys = [chance.randbytes(size) for size in range(1, MAX_KEY_BYTES + 1)]
    chance.shuffle(keys)
    assert names_of(keys, NAME_KEY) == official(keys) == names_in_python(keys, NAME_KEY)
    assert b"".join(name_of(key, NAME_KEY) for key in keys) == official(keys)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 127, 128, 129, 4096, 4097])
def test_every_count_of_keys(count: int) -> None:
    keys = [f"session/7/block/{i}" for i in range(count)]
    assert names_of(keys, NAME_KEY) == official(keys)


@pytest.mark.parametrize("seed", range(20))
def test_keys_of_all_kinds(seed: int) -> None:
    chance = random.Random(seed)
    texts = ["a", "é", "密鑰/塊", "\U0001f511", "with\0nul", "\0", "k" * MAX_KEY_BYTES, "é" * (MAX_KEY_BYTES // 2)]
    blobs = [b"\0", b"\0\0\0", SEPARATOR, b"x" + SEPARATOR, SEPARATOR[:-1], SEPARATOR * 3, b"\xff" * MAX_KEY_BYTES]
    pools: list[list[Key]] = [[*texts[:4]], [*texts], [*blobs[4:5], b"a"], [*blobs], [*texts, *blobs]]
    for pool in pools:
        keys = chance.choices(pool, k=chance.randint(3, 300))
        assert names_of(keys, NAME_KEY) == official(keys)
        assert names_of(tuple(keys), NAME_KEY) == official(keys)


def test_text_and_its_utf8_are_the_same_key_and_buffers_are_bytes() -> None:
    assert names_of(["schlüssel"] * 3, NAME_KEY) == names_of(["schlüssel".encode()] * 3, NAME_KEY)
    buffers: list[Key] = [memoryview(b"abc"), bytearray(b"abc"), b"abc"]  # type: ignore[list-item]
    assert names_of(buffers, NAME_KEY) == official([b"abc"] * 3)


@pytest.mark.parametrize("names", [names_of, names_in_python])
@pytest.mark.parametrize(
    ("key", "problem"),
    [
        ("", "has 0"),
        (b"", "has 0"),
        ("k" * (MAX_KEY_BYTES + 1), "has 1025"),
        ("é" * MAX_KEY_BYTES, "has 2048"),
        (b"k" * 5000, "has 5000"),
        ("\ud800", "not valid Unicode"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
)
@pytest.mark.parametrize("others", [["a"] * 200, [b"a"] * 200, ["a\0b"] * 200, []])
def test_a_wrong_key_is_named(names, key, problem: str, others: list[Key]) -> None:  # type: ignore[no-untyped-def]
    keys = [*others, key, *others]
    with pytest.raises(InvalidInput, match=rf"^key {len(others)}: .*{problem}"):
        names(keys, NAME_KEY)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_name_key_has_32_bytes(size: int) -> None:
    with pytest.raises(InvalidInput, match="32 bytes"):
        names_of(["a"], b"k" * size)


def test_names_never_change() -> None:
    """What is on disks and in other processes has these names."""
    key = bytes(range(NAME_BYTES))
    assert names_of(["session/1"], key).hex() == "c715e0ce844ab2ef80ef121f2951d3c2edd9262bfac36551d73c724ecffd10b4"
    keys: list[Key] = [f"block/{i}" * (1 + i % 60) for i in range(500)]
    assert (
        hashlib.sha256(names_of(keys, key)).hexdigest()
        == "8012d3dbce964a17bf3d820eabbe0b827a041da5d38f1aefd15a77bf7cb18afc"
    )


def test_joins_say_what_they_are() -> None:
    assert joined(["a", "b"]).data == b"a\0b"
    assert joined_by_size(["a", b"bc"]).data == b"abc"


SCRIPT = """
import sys
from anabranch.store.values.live.names import names_of
from anabranch.store.values.live.native import library
print(library() is not None, names_of(["a", "b", "c", "d"], bytes(32)).hex())
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    settings = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "XDG_CACHE_HOME": str(cache),
        "TMPDIR": str(cache),
        **environment,
    }
    command = [sys.executable, "-c", SCRIPT]
    return subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_first_use_builds_once_and_the_twin_gives_the_same(tmp_path: Path) -> None:
    """Several processes start at once with an empty cache; one has the compiled code switched off, one no compiler."""
    twins = [start(tmp_path, ANABRANCH_NATIVE="0"), start(tmp_path / "other", CC="/nowhere/cc")]
    processes = [start(tmp_path) for _ in range(2)]
    compiled = [process.communicate(timeout=100)[0].split() for process in processes]
    plain = [process.communicate(timeout=100)[0].split() for process in twins]
    assert [used for used, _ in plain] == ["False", "False"]
    if COMPILER is not None:
        assert [used for used, _ in compiled] == ["True", "True"]
        assert len(list((tmp_path / "anabranch" / "native").iterdir())) == 1
    assert len({names for _, names in plain + compiled}) == 1


def test_the_cache_is_private_and_there_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    other.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    folder = native_build.default_cache()
    assert folder == home / "anabranch" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    fallback = native_build.default_cache()
    assert fallback.parent == other
    assert fallback.stat().st_mode & 0o777 == 0o700
    assert native_build.default_cache() == fallback
    fallback.rmdir()
    fallback.symlink_to(home)
    assert native_build.default_cache() not in (folder, fallback)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert native_build.default_cache().parent == other


def test_a_problem_of_the_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert "/nowhere/cc failed" in str(native_build.load(PACKAGE, SOURCES, tmp_path))
    monkeypatch.setenv("CC", "false")
    assert "false failed" in str(native_build.load(PACKAGE, SOURCES, tmp_path))
    assert list(tmp_path.iterdir()) == []
