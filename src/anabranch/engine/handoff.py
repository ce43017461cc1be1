"""Both ends of a hand-off: what prefill pushes and when, what decode waits for.

A block is pushed once, complete: cached blocks as their layers become readable, computed blocks layer by layer during
the step that completes them, the partial tail with the step that ends the prompt. A hand-off that fails never fails
its request: decode recomputes the prompt, prefill goes on to the first tokens.
"""

from __future__ import annotations

from anabranch.engine.actions import FinishOutbound, OpenInbound, OpenOutbound, PushLayer
from anabranch.engine.book import Book
from anabranch.engine.kv_port import InboundEnded, InboundOpened, OutboundEnded
from anabranch.engine.messages import Prepared
from anabranch.engine.sequence import Handoff, Sequence, State, block_count


class Push:
    """Blocks that a step completes: (slot, prompt block index, layers already sent), for `PushLayer` at each layer."""

    __slots__ = ("blocks", "handoff")

    def __init__(self, handoff: str, blocks: list[tuple[int, int, int]]) -> None:
        self.handoff = handoff
        self.blocks = blocks

    def at(self, layer: int) -> PushLayer | None:
        """What to send once `layer` is written; None for nothing."""
        blocks = [(slot, index) for slot, index, sent in self.blocks if sent <= layer]
        return PushLayer(self.handoff, layer, blocks) if blocks else None


class Handoffs:
    """`nonce` makes hand-off names unique across restarts of an engine."""

    def __init__(self, book: Book, nonce: str) -> None:
        self._book = book
        self._nonce = nonce

    # --- decode side -------------------------------------------------------------------------------------------

    def open_inbound(self, sequence: Sequence) -> None:
        """Pages for the whole prompt are here: let a peer fill those that the cache did not."""
        book = self._book
        first = sequence.computed // book.block_tokens
        handoff = Handoff(f"{book.engine_id}-{self._nonce}-{book.number()}", first)
        sequence.job.handoff = handoff
        sequence.state = State.OPENING
        book.handoffs[handoff.id] = sequence
        deadline_s = book.config.handoff_timeout_s
        book.do(
            OpenInbound(handoff=handoff.id, slots=sequence.pages[first:], first=first, deadline_s=deadline_s),
        )

    def inbound_opened(self, event: InboundOpened) -> None:
        sequence = self._book.handoffs.get(event.handoff)
        if sequence is None or sequence.state is not State.OPENING:
            return
        job, handoff = sequence.job, sequence.job.handoff
        if handoff is None:
            return
        handoff.prepared = True
        sequence.state = State.RECEIVING
        self._book.log(job, f"prepared: {handoff.first} blocks cached, {event.ticket.blocks} to come")
        cached = handoff.first * self._book.block_tokens
        self._book.send(Prepared(request_id=job.id, ticket=event.ticket, cached=cached))

    def inbound_ended(self, event: InboundEnded) -> Sequence | None:
        """The sequence that may have become ready to decode, None when there is none."""
        sequence = self._book.handoffs.pop(event.handoff, None)
        if sequence is None or sequence.job.handoff is None:
            return None
        job, handoff = sequence.job, sequence.job.handoff
        handoff.ended = True
        handoff.reason = event.reason
        if sequence.state is State.DRAINING:
            self._book.settle(sequence)
            return None
        if not handoff.prepared:
            self._book.fail(job, "unavailable", f"hand-off could not be opened: {event.reason}", retryable=True)
            return None
        if event.reason:
            self._book.count("handoffs_failed")
            self._book.log(job, f"hand-off failed ({event.reason}): the prompt will be recomputed here")
        else:
            self._book.count("handoffs_received")
            self._book.log(job, "hand-off complete")
            sequence.computed = job.prompt
        return sequence

    # --- prefill side ------------------------------------------------------------------------------------------

    def open_outbound(self, sequence: Sequence) -> None:
        """Admitted: start the hand-off with what the cache already has."""
        handoff = sequence.job.handoff
        if handoff is None or handoff.ticket is None or not handoff.open:
            return
        self._book.handoffs[handoff.id] = sequence
        self._book.do(OpenOutbound(handoff.id, handoff.ticket))
        self.push_computed(sequence)
        self.push_loading(sequence)

    def push_computed(self, sequence: Sequence) -> None:
        """Send, in all layers, every complete block that has not been sent."""
        load = sequence.load
        end = sequence.computed if load is None else load.first * self._book.block_tokens
        push = self.push_of(sequence, end)
        if push is not None:
            for layer in range(self._book.info.layout.layers):
                action = push.at(layer)
                if action is not None:
                    self._book.do(action)

    def push_loading(self, sequence: Sequence) -> None:
        """Send the layers of loading blocks that have become readable since the last call."""
        load, handoff = sequence.load, self._pushable(sequence)
        if load is None or handoff is None:
            return
        indices = range(max(load.first, handoff.next_block), load.first + load.blocks)
        blocks = [(sequence.pages[index], index) for index in indices]
        for layer in range(load.pushed, load.layers):
            if blocks:
                self._book.do(PushLayer(handoff.id, layer, blocks))
        load.pushed = load.layers
        for _, index in blocks:
            handoff.partly[index] = load.pushed

    def load_fell_short(self, sequence: Sequence, usable: int) -> None:
        """Blocks from `usable` on must not be read any more, but a layer of them may be on its way: give the hand-off
        up rather than send something else under its name."""
        handoff = self._pushable(sequence)
        if handoff is not None and any(index >= usable for index in handoff.partly):
            self._book.log(sequence.job, "hand-off abandoned: a load that it was forwarding fell short")
            self._book.abandon(sequence)

    def push_of(self, sequence: Sequence, end: int) -> Push | None:
        """The blocks complete at position `end` and not sent yet, marked as sent."""
        handoff = self._pushable(sequence)
        if handoff is None:
            return None
        block_tokens = self._book.block_tokens
        done = block_count(end, block_tokens) if end >= sequence.job.prompt else end // block_tokens
        if done <= handoff.next_block:
            return None
        indices = range(handoff.next_block, done)
        handoff.next_block = done
        return Push(handoff.id, [(sequence.pages[i], i, handoff.partly.get(i, 0)) for i in indices])

    def finish_outbound(self, sequence: Sequence) -> None:
        """All has been pushed; the pages stay until the peer has them."""
        handoff = self._pushable(sequence)
        if handoff is not None:
            handoff.finished = True
            self._book.do(FinishOutbound(handoff.id))
        self._book.running.pop(sequence.number, None)
        sequence.state = State.HOLDING
        self._book.settle(sequence)

    def outbound_ended(self, event: OutboundEnded) -> None:
        sequence = self._book.handoffs.pop(event.handoff, None)
        if sequence is None or sequence.job.handoff is None:
            return
        sequence.job.handoff.ended = True
        sequence.job.handoff.reason = event.reason
        if event.reason:
            self._book.count("handoffs_failed")
        self._book.log(sequence.job, f"hand-off ended: {event.reason or 'all accepted'}")
        if sequence.state in (State.HOLDING, State.DRAINING):
            self._book.settle(sequence)

    def _pushable(self, sequence: Sequence) -> Handoff | None:
        handoff = sequence.job.handoff
        if (
            sequence.job.kind != "prefill"
            or handoff is None
            or not handoff.open
            or handoff.id not in self._book.handoffs
        ):
            return None
        return handoff
