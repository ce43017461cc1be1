"""Identities: golden vectors, equal and different meanings, what cannot be encoded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import golden_identities
import msgspec
import pytest

from anabranch.blocks.hashing import prefix_keys
from anabranch.blocks.key import Identity, Uncacheable, encode_identity
from anabranch.blocks.layout import KvLayout
from anabranch.core.errors import InvalidInput

CASES = golden_identities.load()
LAYOUT = KvLayout(layers=2, kv_heads=4, head_dim=8, block_tokens=4)
BASE = Identity(weights_digest=b"w1", layout=LAYOUT)


def root_of(**changes: Any) -> bytes | Uncacheable:
    return encode_identity(msgspec.structs.replace(BASE, **changes))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_vector(case: dict[str, Any]) -> None:
    assert golden_identities.keys_of(case) == case["gives"]


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_golden_vectors_in_another_process(seed: str) -> None:
    script = Path(golden_identities.__file__)
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    run = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, check=True, timeout=60)
    assert json.loads(run.stdout) == [case["gives"] for case in CASES]


def test_there_are_enough_golden_vectors() -> None:
    assert sum("root" in case["gives"] for case in CASES) >= 40


def test_golden_cases_are_equal_exactly_where_they_say_so() -> None:
    named = {case["name"]: case for case in CASES}
    by_last_key: dict[str, set[str]] = {}
    for case in CASES:
        if "root" in case["gives"]:
            by_last_key.setdefault(case["gives"]["keys"][1], set()).add(case.get("equal_to", case["name"]))
    assert all(len(meanings) == 1 for meanings in by_last_key.values())
    for case in CASES:
        if "equal_to" in case:
            assert case["gives"] == named[case["equal_to"]]["gives"]


def test_s04_missing_none_empty_and_reordered_extra_are_equal() -> None:
    assert root_of() == root_of(extra=None) == root_of(extra={}) == root_of(extra=[]) == root_of(extra=())
    assert root_of(extra={"a": 1, "b": 2}) == root_of(extra={"b": 2, "a": 1}) == root_of(extra=[("b", 2), ("a", 1)])
    assert root_of(extra={"a": 1}) != root_of(extra={"a": 2}) != root_of()


CONTENT_CHANGES: list[dict[str, Any]] = [
    {"weights_digest": b"w2"},
    {"dtype": "float16"},
    {"codec": "int8"},
    {"adapter_digest": b"a"},
    {"extra": {"x": 1}},
    {"key_version": 2},
    *(
        {"layout": msgspec.structs.replace(LAYOUT, **change)}
        for change in (
            {"layers": 3},
            {"kv_heads": 2},
            {"head_dim": 16},
            {"block_tokens": 8},
            {"dtype": "bfloat16"},
            {"kind": "mla", "kv_heads": 1},
            {"kv_heads": 1},
            {"tp_size": 2},
            {"tp_size": 2, "tp_rank": 1},
            {"pp_size": 2},
            {"pp_size": 2, "pp_rank": 1},
        )
    ),
]


def test_mutating_any_content_field_changes_the_root() -> None:
    roots = [root_of(), *(root_of(**change) for change in CONTENT_CHANGES)]
    assert all(isinstance(root, bytes) and len(root) == 32 for root in roots)
    for one, other in combinations(roots, 2):
        assert one != other


def test_the_list_of_mutations_names_every_field() -> None:
    mutated = {name for change in CONTENT_CHANGES for name in change}
    assert mutated | {"media"} == {field.name for field in msgspec.structs.fields(Identity)}
    layouts = [change["layout"] for change in CONTENT_CHANGES if "layout" in change]
    for field in msgspec.structs.fields(KvLayout):
        assert any(getattr(layout, field.name) != getattr(LAYOUT, field.name) for layout in layouts), field.name


def test_s05_media_change_keys_from_their_first_block_only() -> None:
    tokens = list(range(16))
    one, other = b"\x01" * 30 + b"zz", b"\x02" * 30 + b"zz"  # the last 16 bits agree
    chains = []
    for media in ((), ((5, one),), ((5, other),), ((6, one),)):
        chain = msgspec.structs.replace(BASE, media=media).chain(b"k" * 32)
        chain.extend(tokens)
        chains.append(chain.keys)
    assert len({keys[0] for keys in chains}) == 1
    for block in (1, 2, 3):
        assert len({keys[block] for keys in chains}) == len(chains)


def test_media_are_not_in_the_root() -> None:
    assert root_of() == root_of(media=((0, b"d" * 32),))


class Opaque:
    pass


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("type", {"extra": {"x": Opaque()}}),
        ("type", {"extra": {"x": [1, {"y": Opaque()}]}}),
        ("type", {"extra": {Opaque(): 1}}),
        ("type", {"extra": {"x": 1j}}),
        ("nan", {"extra": {"x": float("nan")}}),
        ("text", {"extra": {"x": "\ud800"}}),
        ("text", {"codec": "\ud800"}),
        ("ambiguous", {"extra": [("x", 1), ("x", 2)]}),
        ("ambiguous", {"extra": [("x", None), ("x", 2)]}),
        ("shape", {"extra": "x=1"}),
        ("shape", {"extra": 7}),
        ("shape", {"extra": ["ab"]}),
        ("shape", {"extra": [("x", 1, 2)]}),
        ("weights", {"weights_digest": b""}),
        ("media", {"media": ((0, b"short"),)}),
        ("media", {"media": ((-1, b"d" * 32),)}),
        ("media", {"media": ((1, b"d" * 32), (1, b"e" * 32))}),
    ],
)
def test_what_cannot_be_encoded_is_uncacheable_with_a_reason(reason: str, changes: dict[str, Any]) -> None:
    found = root_of(**changes)
    assert isinstance(found, Uncacheable)
    assert found.reason == reason
    assert found.message
    with pytest.raises(InvalidInput):
        msgspec.structs.replace(BASE, **changes).root()


def test_values_that_contain_themselves_are_uncacheable() -> None:
    ring: list[Any] = []
    ring.append(ring)
    found = root_of(extra={"x": ring})
    assert isinstance(found, Uncacheable)
    assert found.reason == "depth"


def test_root_starts_the_chain() -> None:
    chain = BASE.chain(b"k" * 32)
    chain.extend(range(9))
    assert chain.keys == prefix_keys(BASE.root(), b"k" * 32, 4, list(range(9)))
