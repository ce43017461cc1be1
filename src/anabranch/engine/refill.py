"""Keeping spare slots in stock, and preempting when there are none to be had.

Decode takes pages from the stock without waiting. When the node refuses more, the youngest running sequence gives its
pages back and starts again later from what is cached (recompute: PagedAttention, arXiv 2309.06180, section 4.5); the
oldest always goes on, so at least one request completes.
"""

from __future__ import annotations

from anabranch.engine.actions import Reserve
from anabranch.engine.admission import RETRY_S, Admission
from anabranch.engine.book import Book
from anabranch.engine.kv_port import Reserved
from anabranch.engine.sequence import Sequence, State


class Refill:
    """At most one reservation at a time. After a refusal it asks again when something was freed or time has passed: for
    spares alone, or (`stuck`) also for starved sequences when nobody was left to preempt."""

    def __init__(self, book: Book, admission: Admission) -> None:
        self._book = book
        self._admission = admission
        self._op: int | None = None
        self._asked = 0
        self._refused = False
        self._stuck = False
        self._retry_at = 0.0
        self._frees_seen = 0

    @property
    def outstanding(self) -> int:
        return 0 if self._op is None else 1

    @property
    def next_wake(self) -> float:
        return self._retry_at if self._book.starved and self._op is None else float("inf")

    def top_up(self, now: float) -> None:
        """Ask for more when the stock is half empty or a sequence waits for a page."""
        book = self._book
        book.starved = min(book.starved, len(book.running))
        if self._op is not None:
            return
        least = book.upcoming + book.config.spare_slots // 2 if book.running else 0
        if not book.starved and len(book.spares) >= least:
            return
        target = book.upcoming + book.config.spare_slots
        backing_off = now < self._retry_at and book.frees == self._frees_seen
        if backing_off and (self._stuck or (self._refused and not book.starved)):
            return
        self._ask(book.starved if book.starved and self._refused else max(book.starved, target - len(book.spares)))

    def answered(self, event: Reserved, now: float) -> bool:
        """Take in the answer; False when it is not for the stock."""
        if self._op is None or event.op != self._op:
            return False
        book = self._book
        self._op = None
        if event.slots:
            book.stocked(event.slots)
            book.starved = 0
            self._refused = self._stuck = False
        elif book.starved and self._asked > book.starved:
            self._ask(book.starved)
        elif book.starved and self._preempt_youngest():
            self._ask(1)
        else:
            self._refused = True
            self._stuck = book.starved > 0
            self._retry_at = now + RETRY_S
            self._frees_seen = book.frees
        return True

    def _ask(self, count: int) -> None:
        self._op = self._book.number()
        self._asked = count
        self._book.do(Reserve(self._op, count))

    def _preempt_youngest(self) -> bool:
        """False when only the oldest is left, or none that may be stopped now.

        The last one is stopped only when it is alone and stuck all the same: its blocks may have been published by
        others before it, and those copies, parents of its later blocks, cannot be evicted while it runs. Acquiring
        anew puts it on these copies."""
        book = self._book
        others = len(book.running) > 1 or book.handoffs or book.draining or book.promised
        able = [s for s in book.running.values() if s.load is None and s.pending is None and s.job.kind != "prefill"]
        if not able or (len(able) == 1 and (others or not self._stuck)):
            return False
        self._preempt(max(able, key=lambda sequence: sequence.age))
        return True

    def _preempt(self, victim: Sequence) -> None:
        book = self._book
        book.count("preemptions")
        book.log(victim.job, f"preempted at {len(victim.tokens)} tokens")
        del book.running[victim.number]
        victim.pending = None
        book.release_pages(victim)
        self._admission.enqueue(victim, front=True)

    def evacuate(self, lost: set[int]) -> None:
        """A restarted node did not confirm these slots: somebody else may write to them. Nothing on them counts."""
        book = self._book
        gone = [slot for slot in book.spares if slot in lost]
        book.spares = [slot for slot in book.spares if slot not in lost]
        book.free([slot for slot in gone for _ in range(book.refs.drop(slot))])
        sequences = [sequence for job in book.jobs.values() for sequence in job.sequences]
        for sequence in sorted(sequences, key=lambda sequence: sequence.age, reverse=True):
            if lost.isdisjoint(sequence.pages):
                continue
            if sequence.state is State.RUNNING:
                self._preempt(sequence)
            elif sequence.state is State.RESERVING:
                self._admission.step_back(sequence, book.now)
            elif sequence.state is State.RECEIVING:
                book.release_pages(sequence)
