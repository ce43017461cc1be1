"""Puts: to the home node, and what that one could not take to the next."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from anabranch.store.values.live.call import Call
from anabranch.store.values.live.deposit import Deposit, PutOptions
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.nodes import Nodes
from anabranch.store.values.live.questions import Questions
from anabranch.store.values.live.single import put_one
from anabranch.store.values.messages import INLINE_BYTES, STREAM_BYTES, Offer
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.parts import Parts
from anabranch.store.values.scope import NAME_BYTES
from anabranch.transfer.live.workers import Workers

PATIENCE_S = 1.0
"""How long a node may be silent beyond what it was told to wait, if there is another one."""

WORTH_ASKING = 0.5
"""Share of a node's memory from which on a batch is asked for once more at its end."""


class Puts:
    def __init__(self, nodes: Nodes, workers: Workers, lanes: int, questions: Questions) -> None:
        self._nodes, self._workers, self._lanes, self._questions = nodes, workers, lanes, questions

    def put(self, names: bytes, values: Sequence[Parts], options: PutOptions, call: Call) -> list[Outcome]:
        """One for each name."""
        results = [Outcome.UNREACHABLE] * len(values)
        items = list(range(len(values)))
        hurried = self._nodes.several and not options.durable and options.replicas <= 1
        call.patience_s = options.wait_s + PATIENCE_S if hurried else float("inf")
        for pool in self._nodes.everybody(call):
            if options.chain and items[0]:
                options = msgspec.structs.replace(options, parent=_pick(names, [items[0] - 1]))
            limit = INLINE_BYTES if pool.several_rails else STREAM_BYTES
            if len(items) == 1 and values[items[0]].size <= limit:
                outcome = self._put_one(pool, names, values, items[0], options, call)
                if outcome is not None:
                    results[items[0]] = outcome
                    if outcome is not Outcome.UNREACHABLE or call.over:
                        break
                    continue
            deposit = Deposit(
                pool,
                self._workers,
                names if len(items) == len(values) else _pick(names, items),
                [values[i] for i in items],
                options,
                call,
                lanes=self._lanes,
            )
            for i, outcome in zip(items, deposit.run(), strict=True):
                results[i] = outcome
            self._own_up(pool, names, values, [i for i in items if results[i].stored], results, call)
            items = [i for i in items if results[i] is Outcome.UNREACHABLE]
            if not items or call.over:
                break
        return results

    def _own_up(
        self,
        pool: LanePool,
        names: bytes,
        values: Sequence[Parts],
        stored: list[int],
        results: list[Outcome],
        call: Call,
    ) -> None:
        """A batch that fills much of a node's memory may have driven out what it brought itself: that is FULL."""
        room = pool.welcome.max_value_bytes if pool.welcome is not None else 0
        if not room or len(stored) < 2 or sum(values[i].size for i in stored) <= room * WORTH_ASKING:
            return
        for i, there in zip(stored, self._questions.kept(pool, _pick(names, stored), call), strict=True):
            if not there:
                results[i] = Outcome.FULL

    def _put_one(
        self, pool: LanePool, names: bytes, values: Sequence[Parts], i: int, options: PutOptions, call: Call
    ) -> Outcome | None:
        offer = Offer(
            op=0,
            names=names[i * NAME_BYTES : (i + 1) * NAME_BYTES],
            sizes=[values[i].size],
            chain=options.chain,
            parent=options.parent,
            replicas=options.replicas,
            durable=options.durable,
            wait_s=options.wait_s,
        )
        return put_one(pool, offer, values[i], call)


def _pick(names: bytes, items: Sequence[int]) -> bytes:
    return b"".join([names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in items])
