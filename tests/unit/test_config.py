"""Configuration: layers, conversion, unknown names, all problems at once, the generated page."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.cluster.settings import SECTIONS, Settings, contradictions, role_entries, settings_of
from anabranch.core.config import Entry, environment_entries, file_entries, flag_entry, markdown, masked, resolve, rows
from anabranch.core.live.environment import gather
from anabranch.core.units import format_bytes, parse_bytes, parse_seconds
from anabranch.engine.config import EngineConfig

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def problems_of(*sets: str) -> list[str]:
    return gather(SECTIONS, file=None, variables={}, sets=sets, directory="/nonexistent").problems


def test_later_sources_win_and_every_value_knows_its_origin(tmp_path: Path) -> None:
    file = tmp_path / "anabranch.toml"
    file.write_text('[engine]\nthreads = 3\nstep_tokens = 64\nmax_running = 7\n[node]\ndram_bytes = "1GiB"\n')
    resolved = gather(
        SECTIONS,
        file=None,
        directory=str(tmp_path),
        variables={"ANABRANCH_ENGINE_THREADS": "4", "ANABRANCH_ENGINE_STEP_TOKENS": "128", "PATH": "/bin"},
        sets=["engine.step_tokens=256"],
    )
    assert resolved.problems == []
    engine = settings_of(resolved).engine
    assert (engine.max_running, engine.threads, engine.step_tokens) == (7, 4, 256)
    assert resolved.origin("engine", "max_running") == "anabranch.toml"
    assert resolved.origin("engine", "threads") == "ANABRANCH_ENGINE_THREADS"
    assert resolved.origin("engine", "step_tokens") == "--set engine.step_tokens"
    assert resolved.origin("engine", "block_tokens") == "default"
    assert ("node.dram_bytes", "1GiB", "anabranch.toml") in rows(resolved)
    assert masked(resolved)["engine"]["threads"] == {"value": 4, "origin": "ANABRANCH_ENGINE_THREADS"}


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    """S20: a misspelt key, an impossible value, a contradiction and a bad role make four messages."""
    file = tmp_path / "bad.toml"
    file.write_text('[engine]\nstep_token = 40\n[node]\ndram_bytes = "4 TX"\n[cluster]\ndecode = 0\n')
    _, role = role_entries("read-only")
    resolved = gather(SECTIONS, file=str(file), variables={})
    found = [*resolved.problems, *role, *contradictions(settings_of(resolved))]
    assert len(found) == 4
    assert "engine.step_token" in found[0]
    assert "did you mean 'step_tokens'?" in found[0]
    assert "node.dram_bytes in" in found[1]
    assert '"4 TX": expected a size such as 512MiB' in found[1]
    assert '--role = "read-only": expected one of both, split' in found[2]
    assert "set cluster.decode to at least 1" in found[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engin.threads=1", "unknown section [engin]; did you mean 'engine'?"),
        ("node.threads=1", "unknown key 'threads'; did you mean 'engine.threads'?"),
        ("engine.threads=two", '"two": expected an integer'),
        ("engine.threads=-1", "must be at least 0"),
        ("gateway.port=65536", "must be at most 65535"),
        ("node.lease_s=soon", "expected a duration such as 1.5s or 200ms"),
        ("node.lease_s=nan", "expected a duration"),
        ("node.lease_s=0", "must be greater than 0"),
        ("node.dram_bytes=12XB", "unknown size unit 'XB'"),
        ("model.kv_dtype=float23", "expected one of bfloat16, float16, float32 (did you mean 'float32'?)"),
        ("engine.threads", "expected section.key=value"),
        ("threads=2", "expected section.key=value"),
    ],
)
def test_a_bad_flag_names_key_value_and_remedy(text: str, expected: str) -> None:
    (problem,) = problems_of(text)
    assert problem.startswith(f"--set {text.partition('=')[0]}")
    assert expected in problem


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"engine": {"threads": "2.5"}}, "expected an integer"),
        ({"engine": {"threads": True}}, "expected an integer, got a boolean"),
        ({"engine": {"threads": [1]}}, "expected an integer, got a list"),
        ({"node": {"dram_bytes": 1.5}}, "expected a size such as 512MiB or 4GB, got a number"),
        ({"node": {"listen": 8000}}, "expected text, got an integer"),
        ({"engine": 3}, "expected a table, e.g. [engine]"),
    ],
)
def test_a_file_with_a_wrong_type_is_refused(document: dict[str, object], expected: str) -> None:
    entries, problems = file_entries(document, "x.toml")
    (problem,) = problems + resolve(SECTIONS, entries).problems
    assert expected in problem
    assert "x.toml" in problem


def test_a_bad_entry_leaves_the_weaker_value() -> None:
    entries = [Entry("engine", "threads", "2", "a", "a"), Entry("engine", "threads", "x", "b", "b")]
    resolved = resolve(SECTIONS, entries)
    engine = resolved.sections["engine"]
    assert isinstance(engine, EngineConfig)
    assert engine.threads == 2
    assert resolved.origin("engine", "threads") == "a"
    assert len(resolved.problems) == 1


def test_an_unknown_environment_variable_is_named_with_the_nearest() -> None:
    entries, problems = environment_entries(SECTIONS, {"ANABRANCH_ENGINE_THREDS": "2", "HOME": "/"})
    assert entries == []
    assert problems == [
        "unknown environment variable ANABRANCH_ENGINE_THREDS; did you mean 'ANABRANCH_ENGINE_THREADS'?"
    ]


@pytest.mark.parametrize(("name", "content"), [("absent.toml", None), ("broken.toml", "[engine\n"), ("x.toml", "\xff")])
def test_a_file_that_cannot_be_used_is_one_problem(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    resolved = gather(SECTIONS, file=str(tmp_path / name), variables={})
    assert len(resolved.problems) == 1
    assert name in resolved.problems[0]


def test_defaults_contradict_nothing() -> None:
    assert list(contradictions(Settings())) == []


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["cluster.prefill=0", "cluster.decode=0"], "set at least one"),
        (["cluster.name=../x"], "cluster.name"),
        (["engine.step_tokens=8"], "engine.step_tokens = 8 is less than engine.block_tokens = 16"),
        (["directory.node_ttl_s=100ms"], "directory.node_ttl_s = 0.1s is not longer than node.heartbeat_s"),
        (["node.ssd_bytes=0", "node.ssd_dir=/x"], "node.ssd_bytes = 0"),
        (["gateway.host=0.0.0.0"], "gateway.api_keys_file is empty"),
        (["node.listen=70000"], "expected host:port"),
        (["node.listen=0.0.0.0:7000"], "asks nobody for a secret"),
        (["directory.listen=10.0.0.1:7060"], "asks nobody for a secret"),
    ],
)
def test_contradictions_name_their_keys(sets: list[str], expected: str) -> None:
    (problem,) = contradictions(settings_of(gather(SECTIONS, file=None, variables={}, sets=sets, directory="/none")))
    assert expected in problem


def test_one_colocated_engine_is_no_contradiction() -> None:
    entries, problems = role_entries("both")
    assert problems == []
    settings = settings_of(resolve(SECTIONS, entries))
    assert (settings.cluster.prefill, settings.cluster.decode, settings.cluster.both) == (0, 0, 1)
    assert list(contradictions(settings)) == []


def test_flag_values_may_contain_equals_signs() -> None:
    entry = flag_entry(SECTIONS, "cluster.data_dir=/a=b")
    assert isinstance(entry, Entry)
    assert entry.value == "/a=b"


def test_the_reference_page_is_current() -> None:
    assert DOCS.read_text(encoding="utf-8") == markdown(SECTIONS), (
        "run: anabranch config --markdown > docs/configuration.md"
    )


def test_every_setting_is_described() -> None:
    rows = [line for line in markdown(SECTIONS).splitlines() if line.startswith("| `")]
    assert [line for line in rows if line.endswith("|  |")] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [("512MiB", 512 << 20), ("4GB", 4 * 10**9), ("1.5 GiB", 3 << 29), ("1_024", 1024), ("2tib", 2 << 40), ("7b", 7)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count
    assert parse_bytes(format_bytes(1 << 30)) == 1 << 30


@pytest.mark.parametrize(("text", "seconds"), [("200ms", 0.2), ("1.5s", 1.5), ("2min", 120.0), ("0.25", 0.25)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "abc", "1e9", "-1", "1 2", "5 fortnights"])
def test_nonsense_is_no_size_and_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bytes(text)
    with pytest.raises(ValueError):
        parse_seconds(text)
