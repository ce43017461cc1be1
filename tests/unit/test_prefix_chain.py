"""Block keys: the chain's definition, increments, tenants, refusals."""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3

from anabranch.blocks.hashing import PrefixChain, prefix_keys, tenant_hash_key
from anabranch.core.errors import InvalidInput

ROOT = bytes(range(32))
KEY = b"k" * 32
SECRET = b"s" * 16


def test_keys_are_the_documented_function() -> None:
    tokens = [7, 0, 2**32 - 1, 50_000, 1, 2, 3, 4, 5]
    digest = b"d" * 32
    first = blake3(ROOT + struct.pack("<4I", *tokens[:4]), key=KEY).digest()
    tail = struct.pack("<I", 1) + digest + struct.pack("<I", 3) + b"e" * 32
    second = blake3(first + struct.pack("<4I", *tokens[4:8]) + tail, key=KEY).digest()
    assert prefix_keys(ROOT, KEY, 4, tokens, media=[(7, b"e" * 32), (5, digest)]) == [first, second]


def test_extend_returns_the_new_keys_and_only_full_blocks_have_names() -> None:
    chain = PrefixChain(ROOT, KEY, 4)
    assert chain.extend([1, 2, 3]) == []
    new = chain.extend([4, 5])
    assert len(new) == 1
    assert chain.tokens == 5
    assert chain.extend([]) == []
    assert chain.extend(range(6, 13)) == chain.keys[1:]
    assert chain.keys[:1] == new
    assert chain.keys == prefix_keys(ROOT, KEY, 4, list(range(1, 13)))
    assert all(len(key) == 32 for key in chain.keys)


def test_a_key_depends_on_every_token_before_it_and_on_its_place() -> None:
    base = prefix_keys(ROOT, KEY, 4, [1] * 12)
    assert len(set(base)) == 3
    for at in range(12):
        tokens = [1] * 12
        tokens[at] = 2
        keys = prefix_keys(ROOT, KEY, 4, tokens)
        assert [one == other for one, other in zip(base, keys, strict=True)] == [i < at // 4 for i in range(3)]


def test_forks_part_ways() -> None:
    chain = PrefixChain(ROOT, KEY, 4, media=[(9, b"m" * 32)])
    chain.extend([1, 2, 3, 4, 5])
    twin = chain.fork()
    chain.extend([6, 7, 8])
    twin.extend([9, 9, 9, 9, 9, 9, 9])
    assert chain.keys == prefix_keys(ROOT, KEY, 4, range(1, 9))
    assert twin.keys == prefix_keys(ROOT, KEY, 4, [1, 2, 3, 4, 5, *[9] * 7], media=[(9, b"m" * 32)])


def test_tenants_and_secrets_never_share_keys() -> None:
    hash_keys = [tenant_hash_key(*who) for who in ((SECRET, "a"), (SECRET, "b"), (SECRET, ""), (b"t" * 16, "a"))]
    hash_keys.append(tenant_hash_key(SECRET + b"a", ""))
    assert all(len(hash_key) == 32 for hash_key in hash_keys)
    assert len({prefix_keys(ROOT, hash_key, 4, range(4))[0] for hash_key in hash_keys}) == len(hash_keys)
    assert tenant_hash_key(SECRET, "a") == hash_keys[0]


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "7", None])
def test_a_token_outside_u32_is_refused_and_changes_nothing(token: object) -> None:
    chain = PrefixChain(ROOT, KEY, 2)
    with pytest.raises(InvalidInput, match="token"):
        chain.extend([1, 2, token])  # type: ignore[list-item]
    assert chain.tokens == 0
    assert chain.extend([1, 2]) == prefix_keys(ROOT, KEY, 2, [1, 2])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(InvalidInput, match="32 bytes"):
        PrefixChain(b"short", KEY, 4)
    with pytest.raises(InvalidInput, match="32 bytes"):
        PrefixChain(ROOT, b"", 4)
    with pytest.raises(InvalidInput, match="block_tokens"):
        PrefixChain(ROOT, KEY, 0)
    with pytest.raises(InvalidInput, match="digest"):
        PrefixChain(ROOT, KEY, 4, media=[(0, b"d")])
    for media in ([(-1, ROOT)], [(3, ROOT), (3, KEY)]):
        with pytest.raises(InvalidInput, match="offset"):
            PrefixChain(ROOT, KEY, 4, media=media)
    with pytest.raises(InvalidInput, match="16 bytes"):
        tenant_hash_key(b"short", "a")
    with pytest.raises(InvalidInput, match="Unicode"):
        tenant_hash_key(SECRET, "\ud800")
