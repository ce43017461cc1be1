from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from anabranch.core.errors import InvalidInput
from anabranch.traces.live.files import read_trace
from anabranch.traces.readers import TraceReader, detect_format
from anabranch.traces.schema import Namespaces, TraceRequest, by_session
from anabranch.traces.stats import summarize

MOONCAKE = '{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 9]}'
AGENTS = json.dumps(
    {
        "session": "one",
        "block_size": 64,
        "shared_prefix_tokens": 10,
        "requests": [
            {"t": 0.0, "agent": "main", "input_length": 200, "output_length": 7, "blocks": [[1, 3]], "think_time": 0.0},
            {
                "t": 4.0,
                "agent": "main/1",
                "input_length": 130,
                "output_length": 7,
                "blocks": [[1, 1], [9, 1]],
                "think_time": 2.5,
            },
        ],
    }
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
)


def read(text: str, **settings: bool) -> tuple[list[TraceRequest], TraceReader]:
    reader = TraceReader("t", **settings)  # type: ignore[arg-type]
    return list(reader.requests(text.splitlines())), reader


def test_mooncake() -> None:
    (request,), reader = read(MOONCAKE)
    assert reader.format == "mooncake"
    assert (request.t_s, request.input_tokens, request.output_tokens, request.block_tokens) == (3.0, 1100, 5, 512)
    assert request.ranges == ((0, 2), (9, 1))
    assert request.block_ids() == [0, 1, 9]


def test_agent_sessions_get_their_own_ids() -> None:
    text = AGENTS + "\n" + AGENTS.replace('"one"', '"two"')
    requests, reader = read(text)
    assert reader.format == "agents"
    assert [request.session for request in requests] == ["one", "one", "two", "two"]
    assert list(by_session(requests)) == ["one", "two"]
    first, second, other = requests[0], requests[1], requests[2]
    assert first.block_ids()[0] == second.block_ids()[0]
    assert not set(first.block_ids()) & set(other.block_ids())
    assert (second.agent, second.think_s) == ("main/1", 2.5)


def test_azure_counts_from_its_first_row() -> None:
    requests, reader = read(AZURE)
    assert reader.format == "azure"
    assert [(r.input_tokens, r.output_tokens) for r in requests] == [(4808, 10), (3180, 8)]
    assert requests[1].t_s == pytest.approx(0.052)
    assert summarize(requests).ideal_hit is None


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "t:2: bad mooncake line"),
        ('{"timestamp": 1, "input_length": "x", "output_length": 1, "hash_ids": []}', "input_length"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1, "hash_ids": []}', "negative"),
        ('{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}', "2 hash_ids for 512 tokens"),
        ('{"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [-2]}', "from 0 to"),
    ],
)
def test_a_bad_line_is_named_or_skipped(bad: str, says: str) -> None:
    text = "\n".join([MOONCAKE, bad, MOONCAKE])
    with pytest.raises(InvalidInput) as caught:
        read(text)
    assert "t:2:" in str(caught.value)
    assert says in str(caught.value)
    requests, reader = read(text, lenient=True)
    assert len(requests) == 2
    assert reader.skipped == 1
    assert reader.first_reason.startswith("t:2:")


@pytest.mark.parametrize("blocks", [[[1, 0]], [[-1, 2]], [[1, 9]], [[1, 1 << 33]]])
def test_bad_agent_ranges(blocks: list[list[int]]) -> None:
    session = json.loads(AGENTS)
    session["requests"][0]["blocks"] = blocks
    with pytest.raises(InvalidInput, match="t:1: bad agents line"):
        read(json.dumps(session))


def test_bad_azure_row() -> None:
    with pytest.raises(InvalidInput, match="t:2: bad azure line"):
        read("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n")


@pytest.mark.parametrize("first", ["hello", "[1]", '{"a": 1}', "a,b,c"])
def test_unknown_formats_say_what_is_known(first: str) -> None:
    with pytest.raises(InvalidInput, match=r"t:1: not a known trace; .*mooncake.*agents.*azure"):
        detect_format(first, "t")


def test_an_empty_trace() -> None:
    with pytest.raises(InvalidInput, match="empty"):
        read("\n\n")


def test_namespaces_never_collide() -> None:
    namespaces = Namespaces()
    base = namespaces.base("a")
    assert namespaces.base("a") == base == Namespaces().base("a")
    crowded = Namespaces()
    crowded._names[base >> 32] = "someone else"
    assert crowded.base("a") == base + (1 << 32)


def test_files_plain_gzip_and_shipped(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(MOONCAKE + "\n" + MOONCAKE)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(str(plain))[0] == read_trace(str(packed))[0]
    assert len(read_trace(str(plain), limit=1)[0]) == 1
    shipped, _ = read_trace("")
    summary = summarize(shipped)
    assert (summary.sessions, summary.requests) == (16, 374)
    assert summary.ideal_hit == pytest.approx(0.9287, abs=1e-4)
    packed.write_bytes(packed.read_bytes()[:30])
    with pytest.raises(InvalidInput, match="cannot read the trace"):
        read_trace(str(packed))
    with pytest.raises(InvalidInput, match="cannot read the trace"):
        read_trace(str(tmp_path / "none"))
