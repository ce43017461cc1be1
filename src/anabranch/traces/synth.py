"""Token ids for traces that have only lengths and block ids.

Equal block ids give equal tokens, everywhere and always; different ids differ. A session is scaled to a context window
by one factor for all its lengths, so who shares how much of whose prefix stays as it was.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from anabranch.core.errors import InvalidInput
from anabranch.traces.schema import TraceRequest, common_blocks

# Ordinary words and word pieces in every vocabulary of 32,000 ids or more: behind the special and byte tokens.
PLAIN_TOKENS = range(1000, 30000)


def block_tokens_of(block: int, count: int, vocabulary: range = PLAIN_TOKENS, *, seed: int = 0) -> list[int]:
    """The first `count` token ids of a block: a function of its id and `seed` alone; fewer tokens are a prefix of more.
    Raises InvalidInput if `vocabulary` is empty."""
    if not vocabulary:
        raise InvalidInput("the token range is empty; it must be FIRST:LAST with FIRST < LAST")
    stream = blake3(struct.pack("<QQ", block, seed)).digest(4 * count)
    size = len(vocabulary)
    return [vocabulary[word % size] for word in struct.unpack(f"<{count}I", stream)]


class ScaledTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A request that fits: `pieces` are (block id, tokens) in order and add up to the prompt's length."""

    t_s: float
    session: str
    agent: str
    think_s: float
    pieces: tuple[tuple[int, int], ...]
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    def prompt(self, vocabulary: range = PLAIN_TOKENS, *, seed: int = 0) -> list[int]:
        return [token for block, count in self.pieces for token in block_tokens_of(block, count, vocabulary, seed=seed)]


def scale_factor(requests: Sequence[TraceRequest], context: int, max_output: int) -> float:
    """The factor (at most 1) by which the longest input fits into `context` tokens beside `max_output` new ones.
    Raises InvalidInput if there is no room for even one token per prompt."""
    room = context - max_output
    if room < 1:
        raise InvalidInput(f"a context of {context} tokens leaves no room for prompts beside {max_output} new tokens")
    longest = max((request.input_tokens for request in requests), default=0)
    return min(1.0, room / longest) if longest else 1.0


def scale_session(
    requests: Sequence[TraceRequest], *, context: int, max_output: int, factor: float | None = None
) -> list[ScaledTurn]:
    """One session's requests, scaled so that each prompt and `max_output` new tokens fit into `context`.

    Two prompts with k common blocks have at least floor(k · block_tokens · factor) common tokens. A prompt's tail (less
    than a block in the trace) is the beginning of the block that the same agent's next prompt has in its place, if that
    prompt goes on from this one: so the next prompt extends this one, as it did when it was recorded.
    """
    factor = scale_factor(requests, context, max_output) if factor is None else factor
    following = _next_by_agent(requests)
    return [
        ScaledTurn(
            t_s=request.t_s,
            session=request.session,
            agent=request.agent,
            think_s=request.think_s,
            pieces=_pieces(request, index, following[index], factor),
            output_tokens=max(1, min(max_output, round(request.output_tokens * factor))),
        )
        for index, request in enumerate(requests)
    ]


def _next_by_agent(requests: Sequence[TraceRequest]) -> list[TraceRequest | None]:
    following: list[TraceRequest | None] = [None] * len(requests)
    latest: dict[str, TraceRequest] = {}
    for index in range(len(requests) - 1, -1, -1):
        following[index] = latest.get(requests[index].agent)
        latest[requests[index].agent] = requests[index]
    return following


def _pieces(
    request: TraceRequest, index: int, following: TraceRequest | None, factor: float
) -> tuple[tuple[int, int], ...]:
    size = request.block_tokens
    whole = max(1, int(request.input_tokens * factor))
    pieces: list[tuple[int, int]] = []
    begin = 0
    for place, block in enumerate(request.block_ids()):
        end = min(whole, int((place + 1) * size * factor))
        if end > begin:
            pieces.append((block, end - begin))
            begin = end
    if begin < whole:
        pieces.append((_tail_block(request, index, following), whole - begin))
    return tuple(pieces)


def _tail_block(request: TraceRequest, index: int, following: TraceRequest | None) -> int:
    blocks = request.blocks
    goes_on = following is not None and common_blocks(request.ranges, following.ranges) == blocks < following.blocks
    if following is not None and goes_on:
        return following.block_ids()[blocks]
    name = f"{request.session}\0{request.agent}\0{index}".encode()
    own = int.from_bytes(blake3(name).digest(8), "little")
    return own | (1 << 63)  # no reader gives ids above 2**63
