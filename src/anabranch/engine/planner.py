"""Building one step: decode tokens first, then prefill chunks under the compute quota.

**Covers** which sequences compute how much, their pages (copy-on-write included) and what the step waits for and
sends. **Does not cover** the arithmetic of the quota (`policy.batching`).
"""

from __future__ import annotations

from anabranch.engine.book import Book
from anabranch.engine.handoff import Handoffs
from anabranch.engine.runner import Chunk
from anabranch.engine.sequence import Sequence
from anabranch.engine.step import Step
from anabranch.policy.batching import share_quota


class Planner:
    def __init__(self, book: Book, handoffs: Handoffs, *, needs_history: bool) -> None:
        self._book = book
        self._handoffs = handoffs
        self._needs_history = needs_history
        self.steps = 0

    def plan(self) -> Step | None:
        book = self._book
        step = Step(self.steps + 1)
        prefills: list[Sequence] = []
        positions: list[int] = []
        starved = upcoming = 0
        for sequence in book.running.values():
            if sequence.pending is not None:
                continue
            position = sequence.computed
            if position == len(sequence.tokens) - 1 and sequence.job.forked and sequence.load is None:
                if self._page_ready(sequence, step):
                    # A page asked for now is here in two steps, however fast they are.
                    upcoming += position + 2 >= len(sequence.table.pages) * book.block_tokens
                    positions.append(position)
                    self._add(step, sequence, 1)
                else:
                    starved += 1
            elif sequence.load is None or (sequence.load.layers > 0 and not sequence.load.broken):
                prefills.append(sequence)
        book.starved, book.upcoming = starved, upcoming
        if positions:
            # Decode must not wait for somebody else's load: beside it, only prompts whose load is over.
            prefills = [sequence for sequence in prefills if sequence.load is None]
        if prefills:
            self._add_prefills(step, prefills, positions)
        if not step.chunks:
            return None
        self.steps += 1
        return step

    def _add_prefills(self, step: Step, prefills: list[Sequence], positions: list[int]) -> None:
        book = self._book
        counts = share_quota(
            positions,
            [(sequence.computed, len(sequence.tokens) - sequence.computed) for sequence in prefills],
            quota=float(book.config.step_tokens),
            cost_context=book.info.cost_context,
            block_tokens=book.block_tokens,
        )
        for sequence, count in zip(prefills, counts, strict=True):
            if count:
                self._add(step, sequence, count)
                self._couple(step, sequence, count)

    def _couple(self, step: Step, sequence: Sequence, count: int) -> None:
        """What the chunk waits for, or sends on. A chunk computed on a load sends nothing before the load is whole."""
        if sequence.load is not None:
            step.loads.append(sequence.load.op)
            return
        push = self._handoffs.push_of(sequence, sequence.computed + count)
        if push is not None:
            step.pushes.append(push)

    def _page_ready(self, sequence: Sequence, step: Step) -> bool:
        """Make the page of the next token writable: a new one at a boundary, a copy of one that others still use."""
        table, spares, position = sequence.table, self._book.spares, sequence.computed
        if position == len(table.pages) * table.block_tokens:
            if not spares:
                return False
            table.append([spares.pop()])
        elif sequence.shared_tail:
            if table.needs_copy(position):
                if not spares:
                    return False
                order, back = table.replace(position, spares.pop())
                step.copies.append(order)
                self._book.free(back)
            sequence.shared_tail = False
        return True

    def _add(self, step: Step, sequence: Sequence, count: int) -> None:
        job, tokens, start = sequence.job, sequence.tokens, sequence.computed
        end = start + count
        whole = end == len(tokens)
        sample = 0
        if whole and (job.forked or job.first is None):
            sample = 1 if job.forked else job.request.n
        history = None
        if self._needs_history or (sample and job.history):
            history = tokens if whole else tokens[:end]
        step.parts.append(sequence)
        step.chunks.append(
            Chunk(
                seq=sequence.number,
                tokens=tokens[start:end],
                start=start,
                pages=sequence.pages,
                sample=sample,
                first_choice=sequence.index,
                params=job.request.sampling if sample else None,
                history=history,
                prompt_tokens=len(job.request.tokens),
            )
        )
