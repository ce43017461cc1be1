"""The engine's brain: what to compute next, for whom, in which pages.

`EngineCore` is a function of its inputs: the same events at the same times give the same actions. A driver loops

    actions = core.handle(event, now) for each event;  core.expire(now);  step = core.plan(now);
    run step;  core.finish(step, sampled, now)

and applies the actions of each call in order before the next one. Between `plan` and `finish` (or `abort`) it calls
nothing else. Continuous batching (Orca, OSDI 2022) with chunked prefill, paging and preemption by recompute
(PagedAttention, arXiv 2309.06180).

**Covers** requests from arrival to their last token. **Does not cover** looking up and admitting (`engine.admission`),
hand-offs (`engine.handoff`), page counts (`engine.stock`), running steps (`engine.live.worker`).
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from anabranch.blocks.hashing import PrefixChain
from anabranch.core.errors import InvalidInput, InvariantBroken
from anabranch.engine.actions import Action, CancelLoad
from anabranch.engine.admission import Admission
from anabranch.engine.book import Book
from anabranch.engine.config import EngineConfig
from anabranch.engine.handoff import Handoffs
from anabranch.engine.kv_port import (
    Acquired,
    InboundEnded,
    InboundOpened,
    LayersReady,
    LoadEnded,
    OutboundEnded,
    PortBack,
    PortEvent,
    PortLost,
    Reserved,
)
from anabranch.engine.messages import Cancel, Drain, EngineLoad, Ping, Prefill, Prepare, Start, StepOutput, Submit
from anabranch.engine.planner import Planner
from anabranch.engine.refill import Refill
from anabranch.engine.request import EngineRequest
from anabranch.engine.runner import ModelInfo, Sampled
from anabranch.engine.sequence import Handoff, Job, Kind, Sequence, State, block_count
from anabranch.engine.step import Step
from anabranch.engine.streams import Streams

GatewayEvent = Submit | Prepare | Prefill | Start | Cancel | Drain


class EngineCore:
    """`total_slots`: slots of the node's arena; `nonce`: distinguishes this engine's life from earlier ones of the same
    id; `needs_history`: the runner wants every chunk's full history (`engine.runner.Chunk`)."""

    def __init__(
        self,
        engine_id: str,
        info: ModelInfo,
        config: EngineConfig,
        *,
        total_slots: int,
        nonce: str = "",
        needs_history: bool = False,
    ) -> None:
        self._book = Book(engine_id, info, config, total_slots)
        self._handoffs = Handoffs(self._book, nonce)
        self._admission = Admission(self._book, self._handoffs)
        self._refill = Refill(self._book, self._admission)
        self._streams = Streams(self._book, self._handoffs)
        self._planner = Planner(self._book, self._handoffs, needs_history=needs_history)
        self._deadlines: list[tuple[float, int, str]] = []
        self._step: Step | None = None
        self._draining = False
        self._store_ok = True

    # --- the driver's four calls -------------------------------------------------------------------------------

    def handle(self, event: GatewayEvent | PortEvent, now: float) -> list[Action]:
        """Take in one message or port event. Unknown request ids and operations are ignored: they are late."""
        self._enter(now)
        match event:
            case Submit(request=request):
                self._accept(request, "submit", now)
            case Prepare(request=request):
                self._accept(request, "prepare", now)
            case Prefill(request=request, ticket=ticket):
                if ticket.handoff in self._book.handoffs:
                    message = "prefill and decode are the same engine; submit the request instead"
                    self._book.refuse(request.request_id, "invalid_input", message, retryable=False)
                else:
                    self._accept(request, "prefill", now, Handoff(ticket.handoff, ticket.first, ticket))
            case Start(request_id=request_id, first=first):
                self._start(request_id, first)
            case Cancel(request_id=request_id):
                job = self._book.jobs.get(request_id)
                if job is not None:
                    self._book.log(job, "cancelled")
                    self._book.drop(job)
            case Drain():
                self._draining = True
            case _:
                self._handle_port(event, now)
        return self._leave(now)

    def plan(self, now: float) -> Step | None:
        """The next step, or None when nothing can be computed now."""
        if self._step is not None:
            raise InvariantBroken("plan called while a step is running")
        self._book.now = now
        self._step = self._planner.plan()
        return self._step

    def finish(self, step: Step, sampled: list[Sampled], now: float, broken: Collection[int] = ()) -> list[Action]:
        """Take a step's results in. `broken`: loads (by operation) that the pass gave up waiting for: what was computed
        on them is discarded. Raises InvariantBroken when the answers do not fit the step."""
        self._leave_step(step)
        self._enter(now)
        answers = iter(sampled)
        for sequence, chunk in zip(step.parts, step.chunks, strict=True):
            answer = next(answers, None) if chunk.sample else None
            if chunk.sample and (answer is None or answer.seq != chunk.seq or len(answer.tokens) != chunk.sample):
                raise InvariantBroken(f"step {step.number}: the runner's answer does not fit chunk {chunk.seq}")
            load = sequence.load
            if load is None:
                self._streams.advance(sequence, len(chunk.tokens), answer)
            elif load.op not in broken:
                sequence.pending = (len(chunk.tokens), answer)
            elif not load.broken:
                load.broken = True
                self._book.do(CancelLoad(load.op))
        return self._leave(now)

    def abort(self, step: Step, message: str, now: float) -> list[Action]:
        """The runner failed: every request in the step fails, all others go on."""
        self._leave_step(step)
        self._enter(now)
        for sequence in step.parts:
            if sequence.state is State.RUNNING:
                self._book.fail(sequence.job, "internal_error", message, retryable=True)
        return self._leave(now)

    def expire(self, now: float) -> list[Action]:
        """Deadlines and retries that are due."""
        self._enter(now)
        book = self._book
        while self._deadlines and self._deadlines[0][0] <= now:
            job = self._live(heapq.heappop(self._deadlines))
            if job is None:
                continue
            if job.sequences[0].state is State.HOLDING:
                book.drop(job)
            else:
                book.fail(job, "deadline_exceeded", "the request's deadline passed", retryable=False)
        self._admission.expire(now)
        return self._leave(now)

    def next_wake(self) -> float:
        """The time by which `expire` must be called; infinity when no timer runs."""
        while self._deadlines and self._live(self._deadlines[0]) is None:
            heapq.heappop(self._deadlines)
        wake = min(self._admission.next_wake(), self._refill.next_wake)
        if self._deadlines:
            wake = min(wake, self._deadlines[0][0])
        return wake

    # --- views -------------------------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        book = self._book
        return EngineLoad(
            waiting=len(book.waiting) + len(self._admission.starting),
            running=len(book.running),
            waiting_tokens=sum(len(sequence.tokens) for sequence in book.waiting),
            free_slots=max(0, book.total_slots - len(book.refs) - book.promised),
            total_slots=book.total_slots,
            steps=self._planner.steps,
            preemptions=int(book.counters.get("preemptions", 0)),
            draining=self._draining,
            store_ok=self._store_ok,
            counters=dict(book.counters),
        )

    def census(self) -> dict[str, int]:
        """Everything held or awaited; all zero when idle."""
        book = self._book
        return {
            "requests": len(book.jobs),
            "waiting": len(book.waiting),
            "running": len(book.running),
            "draining": len(book.draining),
            "starting": len(self._admission.starting),
            "loads": len(book.loads) + len(book.orphan_loads),
            "operations": len(book.lookups) + len(book.reserves) + self._refill.outstanding,
            "handoffs": len(book.handoffs),
            "slots": len(book.refs),
            "promised": book.promised,
        }

    def story(self, request_id: str) -> list[str]:
        """The latest events of a request, oldest first."""
        return self._book.story(request_id)

    @property
    def info(self) -> ModelInfo:
        return self._book.info

    @property
    def config(self) -> EngineConfig:
        return self._book.config

    def has(self, request_id: str) -> bool:
        """Whether the request is still here, in any state."""
        return request_id in self._book.jobs

    def requests(self) -> list[str]:
        return list(self._book.jobs)

    @property
    def idle(self) -> bool:
        return not any(self.census().values())

    # --- requests ----------------------------------------------------------------------------------------------

    def _accept(self, request: EngineRequest, kind: Kind, now: float, handoff: Handoff | None = None) -> None:
        book = self._book
        refusal = self._refusal(request)
        if refusal is not None:
            code, message, retryable = refusal
            book.count(f"refused_{code}")
            book.refuse(request.request_id, code, message, retryable=retryable)
            return
        job = Job(request, kind, book.number(), now + request.deadline_s)
        job.handoff = handoff
        sequence = book.new_sequence(job)
        book.jobs[job.id] = job
        heapq.heappush(self._deadlines, (job.deadline, job.arrival, job.id))
        book.log(job, f"{kind}: {job.prompt} tokens, n={request.n}")
        self._admission.enqueue(sequence)

    def _live(self, timer: tuple[float, int, str]) -> Job | None:
        """The request of a timer, None when it is gone (its name may be in use again)."""
        job = self._book.jobs.get(timer[2])
        return job if job is not None and job.arrival == timer[1] else None

    def _refusal(self, request: EngineRequest) -> tuple[str, str, bool] | None:
        """(code, message, retryable) for a request that cannot be taken."""
        book = self._book
        prompt = len(request.tokens)
        if request.request_id in book.jobs:
            return ("invalid_input", f"request {request.request_id} is already here", False)
        if self._draining:
            return ("unavailable", "the engine is draining; use another one", True)
        if len(book.waiting) >= book.config.max_waiting:
            return ("overloaded", f"{len(book.waiting)} requests are waiting already; try again later", True)
        if prompt == 0 or request.n < 1 or request.sampling.max_tokens < 1:
            return ("invalid_input", "a request needs a prompt, n ≥ 1 and max_tokens ≥ 1", False)
        if prompt >= book.info.context_tokens:
            limit = book.info.context_tokens
            return ("context_length_exceeded", f"{prompt} prompt tokens leave no room in a context of {limit}", False)
        if block_count(prompt + 1, book.block_tokens) > book.total_slots:
            room = book.total_slots * book.block_tokens
            what = f"{prompt} tokens and an answer are too long for the arena of {room} tokens; raise node.dram_bytes"
            return ("context_length_exceeded", what, False)
        if min(request.tokens) < 0 or max(request.tokens) >= book.info.vocab:
            return ("invalid_input", f"token ids must be from 0 to {book.info.vocab - 1}", False)
        try:
            if request.cacheable:
                PrefixChain(request.root, request.hash_key, book.block_tokens)
        except InvalidInput as error:
            return ("invalid_input", str(error), False)
        return None

    def _start(self, request_id: str, first: list[int]) -> None:
        job = self._book.jobs.get(request_id)
        if job is None or job.kind != "prepare" or job.first is not None:
            return
        if len(first) != job.request.n:
            message = f"start names {len(first)} first tokens, the request has n={job.request.n}"
            self._book.fail(job, "invalid_input", message, retryable=False)
            return
        job.first = list(first)
        self._book.log(job, "start")
        self._run_received(job.sequences[0])

    def _run_received(self, sequence: Sequence) -> None:
        """Decode a prepared request once both the first tokens and the hand-off's end are here."""
        handoff = sequence.job.handoff
        ready = handoff is not None and handoff.ended and sequence.job.first is not None
        if sequence.state is not State.RECEIVING or not ready:
            return
        if not sequence.pages:
            self._admission.enqueue(sequence, front=True)
            return
        sequence.state = State.RUNNING
        self._book.running[sequence.number] = sequence
        self._streams.commit(sequence)
        if sequence.computed >= sequence.job.prompt:
            self._streams.fork_given(sequence)

    # --- port events -------------------------------------------------------------------------------------------

    def _handle_port(self, event: object, now: float) -> None:
        match event:
            case Acquired():
                self._admission.acquired(event, now)
            case Reserved():
                self._reserved(event, now)
            case LayersReady():
                self._admission.layers_ready(event)
            case LoadEnded():
                ended = self._admission.load_ended(event)
                if ended is not None and ended[0].pending is not None:
                    sequence = ended[0]
                    pending, sequence.pending = sequence.pending, None
                    if pending is not None:
                        self._streams.advance(sequence, *pending)
            case InboundOpened():
                self._handoffs.inbound_opened(event)
            case InboundEnded():
                sequence_or_none = self._handoffs.inbound_ended(event)
                if sequence_or_none is not None:
                    self._run_received(sequence_or_none)
            case OutboundEnded():
                self._handoffs.outbound_ended(event)
            case PortLost():
                self._store_ok = False
            case PortBack(lost=lost):
                self._store_ok = True
                self._refill.evacuate(set(lost))
            case Ping():
                pass
            case _:
                raise InvariantBroken(f"the scheduler does not know {type(event).__name__}")

    def _reserved(self, event: Reserved, now: float) -> None:
        book = self._book
        if self._refill.answered(event, now):
            return
        sequence = book.reserves.pop(event.op, None)
        if sequence is None:
            book.stocked(event.slots)
        else:
            self._admission.reserved(sequence, event, now)

    # --- around every call -------------------------------------------------------------------------------------

    def _enter(self, now: float) -> None:
        if self._step is not None:
            raise InvariantBroken("the scheduler was called while a step is running")
        self._book.now = now

    def _leave_step(self, step: Step) -> None:
        if self._step is not step:
            raise InvariantBroken("finish called for a step that was not planned last")
        self._step = None

    def _leave(self, now: float) -> list[Action]:
        book = self._book
        self._refill.top_up(now)
        self._admission.advance(now)
        tokens = book.take_tokens()
        if tokens:
            book.count("generated_tokens", len(tokens))
            book.send(StepOutput(tokens=tokens))
        if book.spares and not book.running:
            book.drain_spares()
        return book.take_actions()
