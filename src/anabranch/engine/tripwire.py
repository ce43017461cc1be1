"""The tripwire engine: real K/V bytes, no model. One wrong byte anywhere changes the answer.

K/V bytes of (layer, token i) are cut from SHAKE-256(digest, tokens 0 … i); the next token is a hash of every K/V byte
of every layer, read back from the pages, mixed with the seed and the choice index. So the answer is right only if each
page holds the bytes of exactly these tokens, and `tripwire_answer` knows it without any cache.

**Covers** the runner and its oracle. Sampling parameters other than `seed`, and the layer order of a real model beyond
`LayerGate`, have no meaning here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from anabranch.blocks.layout import DTYPE_BYTES, KvLayout
from anabranch.core.errors import InvalidInput
from anabranch.engine.request import FinishReason, SamplingParams, TokenLogprob
from anabranch.engine.runner import Chunk, LayerGate, ModelInfo, Sampled
from anabranch.engine.sequence import finish_reason

if TYPE_CHECKING:
    from _hashlib import HASHXOF

DIGEST_BYTES = 16


def tripwire_info(
    *,
    name: str = "tripwire",
    layers: int = 4,
    block_tokens: int = 16,
    context_tokens: int = 8192,
    vocab: int = 256,
    eos_token_ids: tuple[int, ...] = (),
    digest: bytes = b"tripwire-1",
    kv_heads: int = 1,
    head_dim: int = 8,
) -> ModelInfo:
    """A small model: 64 bytes a token and layer unless told otherwise."""
    layout = KvLayout(layers=layers, kv_heads=kv_heads, head_dim=head_dim, block_tokens=block_tokens)
    return ModelInfo(
        name=name,
        layout=layout,
        context_tokens=context_tokens,
        vocab=vocab,
        eos_token_ids=eos_token_ids,
        digest=digest,
    )


class TripwireRunner:
    """A `ModelRunner` over `memory` ([slots][Full Block]). Raises InvalidInput if a chunk lacks its history."""

    needs_history = True

    def __init__(self, info: ModelInfo, memory: memoryview) -> None:
        self.info = info
        self._memory = memory.cast("B")
        layout = info.layout
        self._token_bytes = layout.kv_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]
        self._part_bytes = layout.block_tokens * self._token_bytes

    def run(self, batch: list[Chunk], gate: LayerGate) -> list[Sampled]:
        layout = self.info.layout
        rows = [_kv_rows(self.info, _history(chunk), chunk.start) for chunk in batch]
        seen: list[list[bytes]] = [[] for _ in batch]
        for layer in range(layout.layers):
            gate.wait(layer)
            for index, chunk in enumerate(batch):
                self._write(chunk, layer, rows[index])
                if chunk.sample:
                    seen[index].append(self._read(chunk, layer))
            gate.done(layer)
        return [self._sample(chunk, b"".join(read)) for chunk, read in zip(batch, seen, strict=True) if chunk.sample]

    def copy_page(self, src: int, dst: int, tokens: int) -> None:
        layout = self.info.layout
        size = tokens * self._token_bytes
        for part in range(layout.layers * layout.parts):
            source = src * layout.full_block_bytes + part * self._part_bytes
            target = dst * layout.full_block_bytes + part * self._part_bytes
            self._memory[target : target + size] = self._memory[source : source + size]

    def close(self) -> None:
        self._memory.release()

    def _part(self, page: int, layer: int, part: int) -> int:
        """Where K (part 0) or V (part 1) of a Layer Block begins."""
        layout = self.info.layout
        return page * layout.full_block_bytes + layer * layout.layer_block_bytes + part * self._part_bytes

    def _write(self, chunk: Chunk, layer: int, rows: list[bytes]) -> None:
        layout, size = self.info.layout, self._token_bytes
        for offset, row in enumerate(rows):
            block, place = divmod(chunk.start + offset, layout.block_tokens)
            for part in range(layout.parts):
                at = self._part(chunk.pages[block], layer, part) + place * size
                cut = (layer * layout.parts + part) * size
                self._memory[at : at + size] = row[cut : cut + size]

    def _read(self, chunk: Chunk, layer: int) -> bytes:
        """Digest of all K and all V bytes of one layer, token by token."""
        layout, size = self.info.layout, self._token_bytes
        full, rest = divmod(chunk.start + len(chunk.tokens), layout.block_tokens)
        digests = b""
        for part in range(layout.parts):
            digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
            for page in chunk.pages[:full]:
                at = self._part(page, layer, part)
                digest.update(self._memory[at : at + self._part_bytes])
            if rest:
                at = self._part(chunk.pages[full], layer, part)
                digest.update(self._memory[at : at + rest * size])
            digests += digest.digest()
        return digests

    def _sample(self, chunk: Chunk, read: bytes) -> Sampled:
        params = chunk.params or SamplingParams()
        choices = range(chunk.first_choice, chunk.first_choice + chunk.sample)
        tokens = [_next_token(self.info, read, params.seed, choice) for choice in choices]
        logprobs = [TokenLogprob(0.0) for _ in tokens] if params.logprobs is not None else None
        return Sampled(chunk.seq, tokens, logprobs)


def tripwire_answer(
    info: ModelInfo, prompt: Sequence[int], params: SamplingParams, *, n: int = 1, limit: int | None = None
) -> list[tuple[list[int], FinishReason]]:
    """What each of the n choices must be, and why it ends: computed from the tokens alone. `limit`: most tokens in a
    sequence (default: the context)."""
    most = info.context_tokens if limit is None else limit
    return [_answer(info, list(prompt), params, choice, most) for choice in range(n)]


def _answer(
    info: ModelInfo, tokens: list[int], params: SamplingParams, choice: int, limit: int
) -> tuple[list[int], FinishReason]:
    layout = info.layout
    size = layout.kv_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]
    parts = [hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(layout.layers * layout.parts)]
    state = _start(info)
    answer: list[int] = []
    new: Iterable[int] = tokens
    while True:
        for token in new:
            state.update(_U32.pack(token))
            row = state.copy().digest(size * len(parts))
            for index, part in enumerate(parts):
                part.update(row[index * size : (index + 1) * size])
        token = _next_token(info, b"".join(part.copy().digest() for part in parts), params.seed, choice)
        answer.append(token)
        reason = finish_reason(params, token, len(answer), len(tokens) + len(answer), limit)
        if reason is not None:
            return answer, reason
        new = (token,)


_U32 = struct.Struct("<I")


def _start(info: ModelInfo) -> HASHXOF:
    return hashlib.shake_256(len(info.digest).to_bytes(4, "little") + info.digest)


def _kv_rows(info: ModelInfo, tokens: Sequence[int], start: int) -> list[bytes]:
    """K/V bytes of tokens start …, each [layers][K, V][heads][head_dim]."""
    state = _start(info)
    state.update(struct.pack(f"<{start}I", *tokens[:start]))
    size = info.layout.token_bytes
    rows: list[bytes] = []
    for token in tokens[start:]:
        state.update(_U32.pack(token))
        rows.append(state.copy().digest(size))
    return rows


def _next_token(info: ModelInfo, read: bytes, seed: int, choice: int) -> int:
    digest = hashlib.blake2b(read, digest_size=8, person=b"next token")
    digest.update(f"{seed}/{choice}".encode())
    return int.from_bytes(digest.digest(), "little") % info.vocab


def _history(chunk: Chunk) -> list[int]:
    end = chunk.start + len(chunk.tokens)
    if chunk.history is None or len(chunk.history) != end:
        have = "none" if chunk.history is None else f"{len(chunk.history)} tokens"
        raise InvalidInput(f"a tripwire chunk needs its history of {end} tokens, got {have}")
    return chunk.history
