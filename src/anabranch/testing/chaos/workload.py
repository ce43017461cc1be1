"""Seeded traffic for the tripwire engine, with the answer to everything that is asked.

Prompts share prefixes as trees do (a few system prompts, branches below them), conversations grow turn by turn on top
of their own answers, siblings arrive in bursts, and most prompts end one token before, at, or one token after a block
boundary. Because the oracle needs no cache, later turns can be asked before the earlier ones were answered.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Literal

import msgspec

from anabranch.engine.request import FinishReason, SamplingParams
from anabranch.engine.runner import ModelInfo
from anabranch.engine.tripwire import tripwire_answer

Fate = Literal["finish", "leave", "deadline"]
TENANTS = ("a", "b")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `expected[i]`: tokens and finish reason of choice i.

    `fate`: "finish" waits for the whole answer; "leave" disconnects after `patience_tokens` tokens or `patience_s`
    seconds, whichever comes first; "deadline" gives the request `patience_s` seconds. `cacheable` False: opts out.
    """

    number: int
    tokens: list[int]
    n: int
    sampling: SamplingParams
    tenant: str
    fate: Fate
    patience_tokens: int
    patience_s: float
    cacheable: bool = True
    expected: list[tuple[list[int], FinishReason]]


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks`: longest prompt in blocks; `answer`: longest answer in tokens; `fresh`: most new tokens in a turn;
    `leave`, `deadline`: shares of asks; `stops`: some asks have stop tokens."""

    blocks: int = 20
    answer: int = 20
    fresh: int = 24
    leave: float = 0.12
    deadline: float = 0.04
    conversations: int = 12
    stops: bool = True


class Workload:
    """An endless sequence of asks; the same seed gives the same sequence."""

    def __init__(self, info: ModelInfo, seed: int, shape: Shape | None = None) -> None:
        self._info = info
        self._random = random.Random(seed)
        self._shape = shape or Shape()
        self._number = 0
        self._tree = self._grow_tree()
        self._talks: list[list[int]] = []
        self._burst: deque[Ask] = deque()

    def next(self) -> Ask:
        self._number += 1
        if self._burst:
            return self._sibling(self._burst.popleft())
        ask = self._turn()
        if self._random.random() < 0.06:
            self._burst.extend([ask] * self._random.randint(2, 5))
        return ask

    # --- prompts ------------------------------------------------------------------------------------------------

    def _grow_tree(self) -> list[list[int]]:
        """Prefixes: roots, branches, twigs; each once, a root weighing as much as all that grows on it."""
        block = self._info.layout.block_tokens
        nodes: list[list[int]] = []
        for _ in range(3):
            root = self._some(self._near(block * self._random.randint(2, 5)))
            nodes.append(root)
            for _ in range(3):
                branch = root + self._some(self._near(block * self._random.randint(1, 3)))
                nodes += [branch, branch + self._some(self._random.randint(1, 2 * block))]
        return nodes

    def _turn(self) -> Ask:
        if len(self._talks) < self._shape.conversations:
            self._talks.append(list(self._random.choice(self._tree)))
        place = self._random.randrange(len(self._talks))
        prompt = self._talks[place] + self._some(self._random.randint(1, self._shape.fresh))
        prompt += self._some(self._to_boundary(len(prompt)))
        ask = self._ask(prompt)
        self._talks[place] = prompt + ask.expected[0][0]
        limit = self._shape.blocks * self._info.layout.block_tokens
        if len(self._talks[place]) + self._shape.fresh + self._info.layout.block_tokens > limit:
            del self._talks[place]
        return ask

    def _sibling(self, model: Ask) -> Ask:
        """The same prompt again, answered with another seed."""
        return self._ask(model.tokens)

    def _to_boundary(self, length: int) -> int:
        """Tokens to add so that the length is one before, at, or one after a block boundary; sometimes none."""
        if self._random.random() < 0.25:
            return 0
        block = self._info.layout.block_tokens
        return (self._random.choice((-1, 0, 1)) - length) % block

    def _near(self, length: int) -> int:
        return length + self._random.choice((-1, 0, 1))

    def _some(self, count: int) -> list[int]:
        return [self._random.randrange(self._info.vocab) for _ in range(count)]

    # --- the rest of a request ----------------------------------------------------------------------------------

    def _ask(self, tokens: list[int]) -> Ask:
        draw = self._random.random
        n = self._random.choices((1, 2, 3, 4), (70, 14, 8, 8))[0]
        sampling = SamplingParams(
            seed=self._random.getrandbits(32),
            max_tokens=1 if draw() < 0.08 else self._random.randint(2, self._shape.answer),
            stop_token_ids=tuple(self._some(self._random.choice((0, 0, 1, 4)) * self._shape.stops)),
            # Has no meaning to the tripwire, but makes the gateway replay instead of resume.
            presence_penalty=0.5 if draw() < 0.2 else 0.0,
        )
        fate: Fate = "finish"
        if draw() < self._shape.leave:
            fate = "leave"
        elif draw() < self._shape.deadline:
            fate = "deadline"
        return Ask(
            number=self._number,
            tokens=tokens,
            n=n,
            sampling=sampling,
            tenant=TENANTS[draw() < 0.2],
            fate=fate,
            patience_tokens=self._random.randint(0, n * sampling.max_tokens),
            patience_s=self._random.choice((0.0, 0.002, 0.01, 0.05, 0.2)),
            cacheable=draw() < 0.96,
            expected=tripwire_answer(self._info, tokens, sampling, n=n),
        )
