"""What the parts of the scheduler share: requests, sequences, slots, and the actions decided so far.

**Covers** book-keeping that any part needs: giving pages back, failing a request, the event log.
**Does not cover** decisions (`engine.admission`, `engine.handoff`, `engine.scheduler`).
"""

from __future__ import annotations

from collections import deque

from anabranch.core.messages import Message
from anabranch.engine.actions import Abandon, Action, CancelLoad, Free, Send
from anabranch.engine.config import EngineConfig
from anabranch.engine.messages import Failed, TokenEvent
from anabranch.engine.runner import ModelInfo
from anabranch.engine.sequence import Job, Sequence, State
from anabranch.paging.block_table import PageRefs, PageTable

STORY_EVENTS = 4096


class Book:
    """The tables. `refs` counts every page held, `spares` are those for decode to grow into: `starved` sequences wait
    for one, `upcoming` will need one within two steps.

    `lookups`, `reserves`: operation → the sequence it is for, None when that one is gone."""

    def __init__(self, engine_id: str, info: ModelInfo, config: EngineConfig, total_slots: int) -> None:
        self.engine_id = engine_id
        self.info = info
        self.config = config
        self.total_slots = total_slots
        self.block_tokens = info.layout.block_tokens
        self.limit = min(info.context_tokens, total_slots * self.block_tokens)
        self.refs = PageRefs()
        self.spares: list[int] = []
        self.jobs: dict[str, Job] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}
        self.draining: dict[int, Sequence] = {}
        self.handoffs: dict[str, Sequence] = {}
        self.lookups: dict[int, Sequence | None] = {}
        self.reserves: dict[int, Sequence | None] = {}
        self.loads: dict[int, Sequence] = {}
        self.orphan_loads: dict[int, list[int]] = {}
        self.promised = 0
        self.starved = 0
        self.upcoming = 0
        self.frees = 0
        self.counters: dict[str, float] = {}
        self._next = 0
        self._actions: list[Action] = []
        self._tokens: list[TokenEvent] = []
        self._story: deque[tuple[float, str, str]] = deque(maxlen=STORY_EVENTS)
        self.now = 0.0

    def number(self) -> int:
        """A fresh number for an operation, a sequence or an arrival."""
        self._next += 1
        return self._next

    def new_sequence(self, job: Job) -> Sequence:
        """The sequence that computes a request's prompt."""
        sequence = Sequence(self.number(), job, 0, job.request.tokens, PageTable(self.refs, self.block_tokens))
        job.sequences.append(sequence)
        return sequence

    def stocked(self, slots: list[int]) -> None:
        """Slots that the port gave to nobody in particular become spares."""
        self.refs.grant(slots)
        self.spares.extend(slots)

    def drain_spares(self) -> None:
        spares, self.spares = self.spares, []
        self.free([slot for slot in spares for _ in range(self.refs.drop(slot))])

    def do(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, message: Message) -> None:
        self._actions.append(Send(message))

    def emit(self, event: TokenEvent) -> None:
        self._tokens.append(event)

    def take_tokens(self) -> list[TokenEvent]:
        tokens, self._tokens = self._tokens, []
        return tokens

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def count(self, name: str, by: float = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + by

    def log(self, job: Job, text: str) -> None:
        self._story.append((self.now, job.id, text))

    def story(self, request_id: str) -> list[str]:
        return [f"{at:.6f} {text}" for at, owner, text in self._story if owner == request_id]

    def free(self, slots: list[int]) -> None:
        if slots:
            self.frees += 1
            self.do(Free(slots))

    def release_pages(self, sequence: Sequence) -> None:
        """Take all pages from a sequence; it has nothing computed any more."""
        back = sequence.table.release()
        sequence.computed = 0
        sequence.published = 0
        sequence.shared_tail = False
        sequence.tiers = []
        self.free(back)

    def retire(self, sequence: Sequence) -> None:
        """The sequence ends, in any state: what may still touch its pages is stopped, and they go back after that."""
        if sequence.state is State.DONE:
            return
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        self.detach(sequence)
        self.running.pop(sequence.number, None)
        sequence.pending = None
        if sequence.load is not None and not sequence.load.broken:
            sequence.load.broken = True
            self.do(CancelLoad(sequence.load.op))
        handoff = sequence.job.handoff
        if sequence.index == 0 and handoff is not None and handoff.open:
            self.abandon(sequence)
        sequence.state = State.DRAINING
        self.settle(sequence)

    def detach(self, sequence: Sequence) -> None:
        """Outstanding lookups and reservations no longer belong to the sequence."""
        if self.lookups.get(sequence.op) is sequence:
            self.lookups[sequence.op] = None
        if self.reserves.get(sequence.op) is sequence:
            self.reserves[sequence.op] = None
        self.promised -= sequence.promised
        sequence.promised = 0

    def abandon(self, sequence: Sequence) -> None:
        handoff = sequence.job.handoff
        if handoff is not None and handoff.open:
            handoff.abandoned = True
            if handoff.id in self.handoffs:
                self.do(Abandon(handoff.id))
            else:
                handoff.ended = True

    def settle(self, sequence: Sequence) -> None:
        """Give a finished sequence's pages back as soon as no load and no hand-off touches them."""
        handoff = sequence.job.handoff
        busy = sequence.index == 0 and handoff is not None and not handoff.ended
        if sequence.load is not None or busy:
            self.draining[sequence.number] = sequence
            return
        self.draining.pop(sequence.number, None)
        self.release_pages(sequence)
        sequence.state = State.DONE
        job = sequence.job
        if self.jobs.get(job.id) is job and all(other.state is State.DONE for other in job.sequences):
            del self.jobs[job.id]

    def drop(self, job: Job) -> None:
        """Forget a request, whatever state it is in; its name is free at once."""
        if self.jobs.get(job.id) is job:
            del self.jobs[job.id]
        for sequence in job.sequences:
            self.retire(sequence)

    def fail(self, job: Job, code: str, message: str, *, retryable: bool, retry_after_s: float = 1.0) -> None:
        self.log(job, f"failed: {code}: {message}")
        self.count(f"failed_{code}")
        self.drop(job)
        self.refuse(job.id, code, message, retryable=retryable, retry_after_s=retry_after_s)

    def refuse(self, request_id: str, code: str, message: str, *, retryable: bool, retry_after_s: float = 1.0) -> None:
        self.send(
            Failed(request_id=request_id, code=code, message=message, retryable=retryable, retry_after_s=retry_after_s)
        )
