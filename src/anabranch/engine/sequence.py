"""The state of one request inside an engine, and of each token stream that it has become.

    WAITING → LOOKUP → RESERVING → RUNNING → (HOLDING) → DONE        Submit, Prefill
                           └→ OPENING → RECEIVING → RUNNING → DONE   Prepare, Start
    any of them → DRAINING → DONE    cancelled or failed while a load or a hand-off may still touch its pages
    RUNNING → WAITING                preempted: pages given back, everything recomputed from the cache on

Plain data: `engine.scheduler` and its parts own every transition.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from enum import Enum
from typing import Literal

from anabranch.blocks.hashing import PrefixChain
from anabranch.engine.request import EngineRequest, FinishReason, SamplingParams, Usage
from anabranch.engine.runner import Sampled
from anabranch.paging.block_table import PageTable
from anabranch.transfer.api import Ticket

Kind = Literal["submit", "prepare", "prefill"]


class State(Enum):
    WAITING = "waiting"
    LOOKUP = "lookup"
    RESERVING = "reserving"
    OPENING = "opening"
    RECEIVING = "receiving"
    RUNNING = "running"
    HOLDING = "holding"
    DRAINING = "draining"
    DONE = "done"


class Load:
    """Blocks `first` … `first + blocks - 1` of a sequence are being filled by the node under operation `op`.

    `layers` of them are in place, `pushed` of those went out on a hand-off. `broken`: a step gave up waiting."""

    __slots__ = ("blocks", "broken", "first", "layers", "op", "pushed", "until")

    def __init__(self, op: int, first: int, blocks: int, until: float) -> None:
        self.op = op
        self.first = first
        self.blocks = blocks
        self.until = until
        self.layers = 0
        self.pushed = 0
        self.broken = False


class Handoff:
    """One transfer of a request's prompt K/V, seen from one end.

    Outbound: blocks below `next_block` have been pushed in all layers; `partly[i]` layers of block i were pushed
    while it was being loaded. Inbound: `prepared` once the ticket is out.
    """

    __slots__ = (
        "abandoned",
        "ended",
        "finished",
        "first",
        "id",
        "next_block",
        "partly",
        "prepared",
        "reason",
        "ticket",
    )

    def __init__(self, handoff: str, first: int, ticket: Ticket | None = None) -> None:
        self.id = handoff
        self.first = first
        self.ticket = ticket
        self.next_block = first
        self.partly: dict[int, int] = {}
        self.prepared = False
        self.finished = False
        self.abandoned = False
        self.ended = False
        self.reason = ""

    @property
    def open(self) -> bool:
        """More may be pushed or received."""
        return not (self.ended or self.abandoned)


class Job:
    """One request: `sequences[0]` computes the prompt for all choices, the others are forked from it.

    `first`: tokens chosen elsewhere (Start), to be used instead of sampling at the prompt's end; `given` once it came.
    """

    __slots__ = (
        "arrival",
        "deadline",
        "first",
        "forked",
        "handoff",
        "history",
        "kind",
        "request",
        "sequences",
        "unfinished",
        "usage",
    )

    def __init__(self, request: EngineRequest, kind: Kind, arrival: int, deadline: float) -> None:
        self.request = request
        self.kind: Kind = kind
        self.arrival = arrival
        self.deadline = deadline
        self.first: list[int] | None = None
        self.forked = False
        self.handoff: Handoff | None = None
        self.usage: Usage | None = None
        self.sequences: list[Sequence] = []
        self.unfinished = request.n
        self.history = needs_history(request.sampling)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def awaits_start(self) -> bool:
        """A prepared request whose first tokens have not come yet: nothing may be sampled for it here."""
        return self.kind == "prepare" and self.first is None


class Sequence:
    """One choice of a job: `tokens` (prompt and generated); the first `computed` have K/V in the pages of `table`.

    `chain` names the full blocks of `tokens`; blocks below `published` need no commit (acquired or committed).
    `pending`: a step's result that counts only if the load it was computed on turns out complete.
    """

    __slots__ = (
        "chain",
        "computed",
        "index",
        "job",
        "load",
        "number",
        "op",
        "pending",
        "promised",
        "published",
        "shared_tail",
        "stalled",
        "state",
        "table",
        "tiers",
        "tokens",
        "until",
    )

    def __init__(self, number: int, job: Job, index: int, tokens: Tokens[int], table: PageTable) -> None:
        self.number = number
        self.job = job
        self.index = index
        self.tokens: list[int] = list(tokens)
        self.table = table
        self.computed = 0
        self.chain: PrefixChain | None = None
        self.published = 0
        self.state = State.WAITING
        self.op = 0
        self.until = 0.0
        self.promised = 0
        self.load: Load | None = None
        self.tiers: list[str] = []
        self.pending: tuple[int, Sampled | None] | None = None
        self.shared_tail = False
        self.stalled = False

    @property
    def pages(self) -> list[int]:
        """The block table, read only."""
        return self.table.pages

    @property
    def age(self) -> tuple[int, int]:
        """Orders sequences by arrival; the largest is the youngest."""
        return (self.job.arrival, self.index)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.job.request.tokens)

    def keys(self, block_tokens: int) -> list[bytes]:
        """Keys of all full blocks of `tokens`; none when the request may not use the cache."""
        request = self.job.request
        if not request.cacheable:
            return []
        if self.chain is None:
            self.chain = PrefixChain(request.root, request.hash_key, block_tokens)
        seen = self.chain.tokens
        if seen < len(self.tokens):
            self.chain.extend(self.tokens[seen:])
        return self.chain.keys


def finish_reason(params: SamplingParams, token: int, generated: int, length: int, limit: int) -> FinishReason | None:
    """Why a stream ends with `token`, its `generated`-th, at a total `length`; None when it goes on.
    `limit`: most tokens in a sequence."""
    if token in params.stop_token_ids and generated > params.min_tokens:
        return "stop"
    if generated >= params.max_tokens or length >= limit:
        return "length"
    return None


def needs_history(params: SamplingParams) -> bool:
    """Whether choosing a token depends on the tokens before it."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.min_tokens > 0
    )


def block_count(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)


def origin_of_prompt(prompt: int, ready_blocks: int, tiers: Tokens[str], block_tokens: int) -> Usage:
    """Where the prompt's tokens came from: `ready_blocks` found in the arena, then one loaded block per entry of
    `tiers`, the rest computed."""
    dram = ready_blocks * block_tokens
    ssd = tiers.count("ssd") * block_tokens
    peer = (len(tiers) - tiers.count("ssd")) * block_tokens
    return Usage(prompt=prompt, computed=prompt - dram - ssd - peer, dram=dram, ssd=ssd, peer=peer)
