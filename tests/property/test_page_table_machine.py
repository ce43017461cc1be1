"""Sequences paging on a real SlotPool, with page contents simulated: every sequence must always read its own tokens,
a published block must never change, and every node reference must come back."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.paging.block_table import PageRefs, PageTable
from anabranch.paging.pool import SlotPool

SLOTS = 10
BLOCK = 3


class Sequence:
    def __init__(self, table: PageTable, tokens: list[int]) -> None:
        self.table, self.tokens = table, tokens


def name(tokens: list[int]) -> bytes:
    return bytes(tokens)


class PagingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(SLOTS)
        self.memory = [[0] * BLOCK for _ in range(SLOTS)]
        self.refs = PageRefs()
        self.sequences: list[Sequence] = []

    def pick(self, data: st.DataObject) -> Sequence:
        return self.sequences[data.draw(st.integers(0, len(self.sequences) - 1))]

    def free(self, slots: list[int]) -> None:
        for slot in slots:
            self.pool.unref(slot)

    def page(self) -> int | None:
        slots = self.pool.reserve(1)
        if slots is None:
            return None
        self.refs.grant(slots)
        return slots[0]

    def write(self, sequence: Sequence, token: int) -> None:
        """What an engine does for one token; nothing when the pool is full."""
        position = len(sequence.tokens)
        table = sequence.table
        if table.missing(position + 1):
            fresh = self.page()
            if fresh is None:
                return
            table.append([fresh])
        elif table.needs_copy(position):
            fresh = self.page()
            if fresh is None:
                return
            order, freed = table.replace(position, fresh)
            self.memory[order.dst][: order.tokens] = self.memory[order.src][: order.tokens]
            self.free(freed)
        self.memory[table.pages[position // BLOCK]][position % BLOCK] = token
        sequence.tokens.append(token)
        if len(sequence.tokens) % BLOCK == 0:
            self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        full = len(sequence.tokens) // BLOCK
        if sequence.table.sealed != full - 1:
            return
        parent = name(sequence.tokens[: (full - 1) * BLOCK])
        slot = sequence.table.pages[full - 1]
        if self.pool.commit(slot, name(sequence.tokens[: full * BLOCK]), parent) == "published":
            sequence.table.seal(full)

    @precondition(lambda self: len(self.sequences) < 5)
    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=9))
    def arrive(self, prompt: list[int]) -> None:
        """Take the cached prefix, recompute the last token even on a full hit, compute the rest."""
        table = PageTable(self.refs, BLOCK)
        found = self.pool.acquire([name(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)])
        self.refs.grant(found)
        table.append(found, sealed=True)
        sequence = Sequence(table, prompt[: min(len(found) * BLOCK, len(prompt) - 1)])
        self.sequences.append(sequence)
        for token in prompt[len(sequence.tokens) :]:
            self.write(sequence, token)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(1, 2))
    def decode(self, data: st.DataObject, token: int) -> None:
        self.write(self.pick(data), token)

    @precondition(lambda self: 0 < len(self.sequences) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        self.sequences.append(Sequence(parent.table.fork(), list(parent.tokens)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def shorten(self, data: st.DataObject, keep: int) -> None:
        sequence = self.pick(data)
        self.free(sequence.table.truncate(keep))
        del sequence.tokens[keep * BLOCK :]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.sequences.remove(sequence)
        self.free(sequence.table.release())

    @invariant()
    def everybody_reads_their_own_tokens(self) -> None:
        for sequence in self.sequences:
            cells = [cell for slot in sequence.table.pages for cell in self.memory[slot]]
            assert cells[: len(sequence.tokens)] == sequence.tokens

    @invariant()
    def published_blocks_hold_what_their_name_says(self) -> None:
        for block in self.pool.residents():
            assert self.memory[block.slot] == list(block.key[-BLOCK:])

    @invariant()
    def references_add_up(self) -> None:
        self.pool.check()
        assert self.refs.granted == sum(self.pool.refs(slot) for slot in range(SLOTS))
        holders: dict[int, int] = {}
        for sequence in self.sequences:
            for slot in sequence.table.pages:
                holders[slot] = holders.get(slot, 0) + 1
        assert {slot: self.refs.holders(slot) for slot in self.refs.held()} == holders

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.free(sequence.table.release())
        assert (len(self.refs), self.refs.granted) == (0, 0)
        assert self.pool.free + self.pool.evictable == SLOTS
        assert self.pool.reserve(SLOTS) is not None


PagingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPaging = PagingMachine.TestCase
