"""From waiting to running: look the prefix up, reserve the rest, start.

FIFO. A sequence either gets all pages that its present tokens need or gives back what it has and waits, so half
admitted sequences never block each other; when slots are short, one is tried at a time. A watermark of slots stays
free for running sequences to grow into (PagedAttention, arXiv 2309.06180, section 4.5).
"""

from __future__ import annotations

from anabranch.engine.actions import Acquire, CancelLoad, Reserve
from anabranch.engine.book import Book
from anabranch.engine.handoff import Handoffs
from anabranch.engine.kv_port import Acquired, LayersReady, LoadEnded, Reserved
from anabranch.engine.sequence import Job, Load, Sequence, State, block_count, origin_of_prompt

RETRY_S = 0.05
LOOKUP_GRACE_S = 1.0


class Admission:
    """`starting`: sequences between waiting and running; `loading`: those with a load under way."""

    def __init__(self, book: Book, handoffs: Handoffs) -> None:
        self._book = book
        self._handoffs = handoffs
        self.starting: dict[int, Sequence] = {}
        self.loading: dict[int, Sequence] = {}
        self._squeezed = False
        self._retry_at = 0.0
        self._frees_seen = 0

    @property
    def watermark(self) -> int:
        return min(self._book.config.spare_slots, self._book.total_slots // 16)

    def enqueue(self, sequence: Sequence, *, front: bool = False) -> None:
        sequence.state = State.WAITING
        if front:
            self._book.waiting.appendleft(sequence)
        else:
            self._book.waiting.append(sequence)

    # --- starting ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Start looking up as many waiting sequences as may run."""
        book = self._book
        self._forget_gone()
        if self._squeezed and book.frees != self._frees_seen:
            self._retry_at = now
        while book.waiting and not book.starved:
            sequence = book.waiting[0]
            if sequence.load is not None or (self._squeezed and (self.starting or now < self._retry_at)):
                return
            if not self._room_to_run(sequence) or (self.starting and not self._fits(sequence)):
                return
            book.waiting.popleft()
            self._look_up(sequence, now)

    def _forget_gone(self) -> None:
        gone = (State.DRAINING, State.DONE)
        for table in (self.starting, self.loading):
            for number in [number for number, sequence in table.items() if sequence.state in gone]:
                del table[number]

    def _room_to_run(self, sequence: Sequence) -> bool:
        """max_running counts every choice, also those not forked yet and those waiting for a hand-off."""
        received = (other for other in self._book.handoffs.values() if other.state in (State.OPENING, State.RECEIVING))
        busy = (*self._book.running.values(), *self.starting.values(), *received)
        active = sum(job.unfinished for job in {id(other.job): other.job for other in busy}.values())
        mine = sequence.job.request.n if not sequence.job.forked else 1
        return active == 0 or active + mine <= self._book.config.max_running

    def _fits(self, sequence: Sequence) -> bool:
        need = block_count(len(sequence.tokens), self._book.block_tokens)
        return self._has_room(need)

    def _has_room(self, need: int) -> bool:
        book = self._book
        return len(book.refs) + book.promised + need + self.watermark <= book.total_slots

    def _look_up(self, sequence: Sequence, now: float) -> None:
        book = self._book
        self.starting[sequence.number] = sequence
        reusable = (len(sequence.tokens) - 1) // book.block_tokens
        keys = sequence.keys(book.block_tokens)[:reusable]
        if not keys:
            self._reserve_rest(sequence)
            return
        sequence.state = State.LOOKUP
        sequence.op = book.number()
        sequence.until = now + book.config.load_timeout_s + LOOKUP_GRACE_S
        sequence.promised = block_count(len(sequence.tokens), book.block_tokens)
        book.promised += sequence.promised
        book.lookups[sequence.op] = sequence
        load = sequence.job.kind != "prepare" or sequence.job.forked
        book.log(sequence.job, f"looking up {len(keys)} blocks")
        book.do(
            Acquire(
                op=sequence.op,
                keys=keys,
                tenant=sequence.job.request.tenant,
                load=load,
                deadline_s=book.config.load_timeout_s,
            )
        )

    def acquired(self, event: Acquired, now: float) -> None:
        book = self._book
        sequence = book.lookups.pop(event.op, None)
        if sequence is None:
            book.free(list(event.ready))
            if event.loading:
                book.orphan_loads[event.op] = list(event.loading)
                book.do(CancelLoad(event.op))
            return
        book.detach(sequence)
        book.refs.grant([*event.ready, *event.loading])
        sequence.table.append(event.ready, sealed=True)
        sequence.table.append(event.loading)
        sequence.published = len(sequence.pages)
        sequence.computed = sequence.published * book.block_tokens
        if event.loading:
            until = now + book.config.load_timeout_s
            sequence.load = Load(event.op, len(event.ready), len(event.loading), until)
            book.loads[event.op] = sequence
            self.loading[sequence.number] = sequence
        book.log(sequence.job, f"found {len(event.ready)} blocks, loading {len(event.loading)}")
        self._reserve_rest(sequence, now)

    def _reserve_rest(self, sequence: Sequence, now: float = 0.0) -> None:
        book = self._book
        rest = block_count(len(sequence.tokens), book.block_tokens) - len(sequence.pages)
        if not self._has_room(rest) and (book.running or len(self.starting) > 1):
            self.step_back(sequence, max(now, book.now))
            return
        sequence.state = State.RESERVING
        sequence.op = book.number()
        sequence.promised = rest
        book.promised += rest
        book.reserves[sequence.op] = sequence
        book.do(Reserve(sequence.op, rest))

    def reserved(self, sequence: Sequence, event: Reserved, now: float) -> None:
        """The answer to the reservation of a sequence that is still there."""
        book = self._book
        book.detach(sequence)
        if not event.slots:
            self.step_back(sequence, now)
            return
        self._squeezed = False
        book.refs.grant(event.slots)
        sequence.table.append(event.slots)
        del self.starting[sequence.number]
        if sequence.job.kind == "prepare" and not sequence.job.forked and sequence.job.handoff is None:
            self._handoffs.open_inbound(sequence)
            return
        sequence.state = State.RUNNING
        book.running[sequence.number] = sequence
        if sequence.load is None:
            self._account(sequence)
        self._handoffs.open_outbound(sequence)

    def step_back(self, sequence: Sequence, now: float) -> None:
        """No room: give everything back and wait at the head of the queue."""
        book = self._book
        book.detach(sequence)
        book.log(sequence.job, "no room yet")
        book.count("admissions_refused")
        self.starting.pop(sequence.number, None)
        self._squeezed = True
        self._retry_at = now + RETRY_S
        if sequence.load is not None:
            # Its slots may be written to until the load has ended; `ended` brings it back to the queue.
            sequence.state = State.WAITING
            if not sequence.load.broken:
                sequence.load.broken = True
                book.do(CancelLoad(sequence.load.op))
        else:
            book.release_pages(sequence)
        self.enqueue(sequence, front=True)
        self._frees_seen = book.frees

    # --- loads -------------------------------------------------------------------------------------------------

    def layers_ready(self, event: LayersReady) -> None:
        sequence = self._book.loads.get(event.op)
        if sequence is not None and sequence.load is not None:
            sequence.load.layers = max(sequence.load.layers, event.layers)
            self._handoffs.push_loading(sequence)

    def load_ended(self, event: LoadEnded) -> tuple[Sequence, bool] | None:
        """(sequence, everything arrived) for a sequence that goes on; None when nobody waits for this load."""
        book = self._book
        orphans = book.orphan_loads.pop(event.op, None)
        if orphans is not None:
            book.free(orphans)
            return None
        sequence = book.loads.pop(event.op, None)
        if sequence is None or sequence.load is None:
            return None
        load, sequence.load = sequence.load, None
        self.loading.pop(sequence.number, None)
        if sequence.state is State.DRAINING:
            book.settle(sequence)
            return None
        if sequence.state is State.WAITING:
            book.release_pages(sequence)
            return None
        sequence.tiers = list(event.tiers[: event.usable])
        sequence.table.seal(load.first + event.usable)
        whole = event.usable >= load.blocks
        if not whole:
            usable = load.first + event.usable
            sequence.computed = usable * book.block_tokens
            sequence.published = usable
            sequence.pending = None
            self._handoffs.load_fell_short(sequence, usable)
            book.count("loads_short")
            book.log(sequence.job, f"load fell short: {event.usable} of {load.blocks} blocks ({event.reason})")
        if sequence.state is State.RUNNING:
            self._account(sequence)
            self._handoffs.push_computed(sequence)
        return sequence, whole

    def _account(self, sequence: Sequence) -> None:
        """Fix the prompt's origin at the first admission."""
        job: Job = sequence.job
        if job.usage is None and job.kind != "prepare":
            block_tokens = self._book.block_tokens
            ready = sequence.computed // block_tokens - len(sequence.tiers)
            usage = job.usage = origin_of_prompt(job.prompt, ready, sequence.tiers, block_tokens)
            for origin in ("computed", "dram", "ssd", "peer"):
                self._book.count(f"prompt_tokens_{origin}", getattr(usage, origin))

    # --- deadlines ---------------------------------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """Lookups that never came back are misses; loads that take too long are stopped."""
        book = self._book
        self._forget_gone()
        for sequence in [s for s in self.starting.values() if s.state is State.LOOKUP and s.until <= now]:
            book.detach(sequence)
            book.count("lookups_timed_out")
            self._reserve_rest(sequence, now)
        for sequence in self.loading.values():
            load = sequence.load
            if load is not None and not load.broken and load.until <= now:
                load.broken = True
                book.count("loads_timed_out")
                book.do(CancelLoad(load.op))

    def next_wake(self) -> float:
        """When `expire` or `advance` has something to do; infinity for never."""
        times = [s.until for s in self.starting.values() if s.state is State.LOOKUP]
        times += [s.load.until for s in self.loading.values() if s.load is not None and not s.load.broken]
        if self._squeezed and self._book.waiting:
            times.append(self._retry_at)
        return min(times, default=float("inf"))
