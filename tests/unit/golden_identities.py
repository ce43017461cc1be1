"""Reads golden identities, prints their keys. Runs on its own too, so that a test can ask another process.

In the file, {"bytes": hex} is bytes, {"pairs": [[k, v], …]} a mapping (JSON keys are text only), {"set": […]} a set.
`equal_to` names a case that means the same. To make the file anew: `python golden_identities.py --write`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anabranch.blocks.hashing import prefix_keys, tenant_hash_key
from anabranch.blocks.key import Identity, encode_identity
from anabranch.blocks.layout import KvLayout

GOLDEN = Path(__file__).with_name("golden_identities.json")
BASE_LAYOUT = {"layers": 30, "kv_heads": 3, "head_dim": 64, "block_tokens": 16}
SECRET = bytes(range(32))


def value_of(raw: Any) -> Any:
    if isinstance(raw, list):
        return [value_of(item) for item in raw]
    if isinstance(raw, dict):
        if set(raw) == {"bytes"}:
            return bytes.fromhex(raw["bytes"])
        if set(raw) == {"pairs"}:
            return {value_of(k): value_of(v) for k, v in raw["pairs"]}
        if set(raw) == {"set"}:
            return {value_of(item) for item in raw["set"]}
        return {k: value_of(v) for k, v in raw.items()}
    return raw


def identity_of(raw: dict[str, Any]) -> Identity:
    fields = {name: value_of(value) for name, value in raw.items() if name not in ("layout", "media")}
    fields.setdefault("weights_digest", b"weights of revision 1")
    layout = KvLayout(**{**BASE_LAYOUT, **raw.get("layout", {})})
    media = tuple((offset, bytes.fromhex(digest)) for offset, digest in raw.get("media", []))
    return Identity(layout=layout, media=media, **fields)


def keys_of(case: dict[str, Any]) -> dict[str, Any]:
    """The root, and the keys of blocks 0 and 2 of the case's tokens."""
    identity = identity_of(case["identity"])
    root = encode_identity(identity)
    if not isinstance(root, bytes):
        return {"uncacheable": root.reason}
    tokens = case.get("tokens", list(range(100, 100 + 3 * identity.layout.block_tokens)))
    hash_key = tenant_hash_key(SECRET, case.get("tenant", "default"))
    keys = prefix_keys(root, hash_key, identity.layout.block_tokens, tokens, media=identity.media)
    return {"root": root.hex(), "keys": [keys[0].hex(), keys[2].hex()]}


def load() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads(GOLDEN.read_text())
    return cases


def main() -> None:
    cases = load()
    if "--write" in sys.argv:
        text = ",\n".join(json.dumps({**case, "gives": keys_of(case)}) for case in cases)
        GOLDEN.write_text(f"[\n{text}\n]\n")
    else:
        sys.stdout.write(json.dumps([keys_of(case) for case in cases]))


if __name__ == "__main__":
    main()
