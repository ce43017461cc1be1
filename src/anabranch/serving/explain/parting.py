"""Where two prompts part, in tokens, blocks and characters, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

import msgspec

from anabranch.core.errors import InvalidInput
from anabranch.serving.explain.document import Document, Part

WORD_PIECES = re.compile(r" ?[^\W\d_]{1,8}|\d|\s|[^\w\s]|_", re.UNICODE)

Token = tuple[Hashable, int, int]
"""(what is compared, first character, end character)"""
Tokenize = Callable[[str], Sequence[Token]]


def word_pieces(text: str) -> list[Token]:
    """An estimate where no tokenizer is at hand: short words with the space before them, single digits and signs.
    About as many pieces as a real tokenizer gives for English text and code."""
    return [(match.group(), match.start(), match.end()) for match in WORD_PIECES.finditer(text)]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt at the parting. `offset`: first differing character of the whole text; `part_offset`: the same within
    `part`; `before` and `after`: text around it."""

    tokens: int
    offset: int
    part: Part | None
    part_offset: int
    before: str
    after: str


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """`token`: index of the first token that differs (equal to a prompt's length if it ends there).
    `shared_blocks`: full blocks of B that A left in the cache; `lost_blocks`: full blocks of B that are not shared.
    `same_again_tokens`: tokens of B that would be shared as well if the differing stretch did not come before them."""

    block_tokens: int
    token: int
    shared_blocks: int
    lost_blocks: int
    same_again_tokens: int
    a: Side
    b: Side

    @property
    def identical(self) -> bool:
        return self.token == self.a.tokens == self.b.tokens

    @property
    def extends(self) -> bool:
        """B begins with all of A, or A with all of B: nothing is lost that could have been kept."""
        return self.token in (self.a.tokens, self.b.tokens)

    @property
    def lost_percent(self) -> float:
        return 100 * self.lost_blocks / max(1, self.shared_blocks + self.lost_blocks)


def find_parting(a: Document, b: Document, tokenize: Tokenize, block_tokens: int) -> Parting:
    """Compare two prompts. Raises InvalidInput if only one of them is given as token ids."""
    if (a.tokens is None) != (b.tokens is None):
        raise InvalidInput("one prompt is token ids and the other is text; give both in the same form")
    left, right = _tokens(a, tokenize), _tokens(b, tokenize)
    common = common_prefix([token[0] for token in left], [token[0] for token in right])
    shared = common // block_tokens if a.model == b.model or not (a.model and b.model) else 0
    offset = common_prefix(a.text, b.text)
    return Parting(
        block_tokens=block_tokens,
        token=common,
        shared_blocks=shared,
        lost_blocks=len(right) // block_tokens - shared,
        same_again_tokens=_same_again(a.text, b.text, offset, right),
        a=_side(a, left, offset, common),
        b=_side(b, right, offset, common),
    )


def common_prefix(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix, by bisection over slices: fast on long texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _tokens(document: Document, tokenize: Tokenize) -> Sequence[Token]:
    if document.tokens is not None:
        return [(token, index, index + 1) for index, token in enumerate(document.tokens)]
    return tokenize(document.text)


def _side(document: Document, tokens: Sequence[Token], offset: int, common: int) -> Side:
    if document.tokens is not None:
        ids = [str(token[0]) for token in tokens]
        before, after = " ".join(ids[max(0, common - 4) : common]), " ".join(ids[common : common + 4])
        return Side(tokens=len(tokens), offset=common, part=None, part_offset=common, before=before, after=after)
    part = document.part_at(offset)
    return Side(
        tokens=len(tokens),
        offset=offset,
        part=part,
        part_offset=max(0, offset - part.start) if part else 0,
        before=document.text[max(0, offset - 32) : offset],
        after=document.text[offset : offset + 32],
    )


def _same_again(a: str, b: str, offset: int, tokens_of_b: Sequence[Token]) -> int:
    """Tokens of B in the next stretch that both prompts have in common behind the difference."""
    back_a, back_b = resume(a, b, offset)
    length = common_prefix(a[back_a:], b[back_b:])
    return sum(1 for _, first, end in tokens_of_b if back_b <= first and end <= back_b + length)


def resume(a: str, b: str, offset: int, *, anchor: int = 24, reach: int = 4000) -> tuple[int, int]:
    """Offsets in A and B, the nearest behind the difference, from which at least `anchor` characters are the same
    again; the ends of both if there are none within `reach` characters."""
    window_a, window_b = a[offset : offset + reach + anchor], b[offset : offset + reach + anchor]
    places: dict[str, int] = {}
    for at in range(max(1, len(window_a) - anchor + 1)):
        places.setdefault(window_a[at : at + anchor], at)
    best: tuple[int, int] | None = None
    for at in range(max(1, len(window_b) - anchor + 1)):
        found = places.get(window_b[at : at + anchor])
        if found is not None and window_b[at : at + anchor] and (best is None or found + at < sum(best)):
            best = (found, at)
        if best is not None and at > sum(best):
            break
    return (offset + best[0], offset + best[1]) if best else (len(a), len(b))
