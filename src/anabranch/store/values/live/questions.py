"""What a client asks nodes about values without moving their bytes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from anabranch.core.errors import AccessDenied, AnabranchError, Retryable, Unavailable, WireError
from anabranch.core.messages import Message
from anabranch.store.messages import Stat, StatRequest
from anabranch.store.shards import Whereabouts
from anabranch.store.values.live.call import Call
from anabranch.store.values.live.lanes import LanePool
from anabranch.store.values.live.nodes import Nodes
from anabranch.store.values.messages import MAX_ITEMS, Done, Exists, Invalidate, Pin, Prefetch, Presence, Remove
from anabranch.store.values.outcome import Outcome
from anabranch.store.values.scope import NAME_BYTES

M = TypeVar("M")
ASK_S = 1.0
"""How long the directory may think before the nodes are asked without it."""


def ask(pool: LanePool, message: Message, kind: type[M], call: Call) -> M:
    """One request and its answer. Raises what `LanePool.lane` raises, WireError for another answer."""
    with pool.lane(call) as lane:
        lane.send(message)
        return lane.answer(kind, getattr(message, "op", None))


class Questions:
    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._ops = itertools.count(1)

    def exists(self, names: bytes, call: Call) -> list[bool | None]:
        """For each name: somebody holds it, nobody does, or (None) nobody can say."""
        count = len(names) // NAME_BYTES
        found = self._where(names, call)
        known: list[bool | None] = [None] * count if found is None else found.known()
        if all(known):
            return known
        doubt = found is None and self._nodes.directory is not None
        # The home node: what was put there a moment ago need not have been announced yet.
        candidates = self._nodes.candidates(call)
        for pool in candidates[:1] if self._nodes.directory is not None else candidates:
            left = [i for i, there in enumerate(known) if not there]
            if not left:
                break
            try:
                self._merge(known, left, self._present(pool, _pick(names, left), call), doubt)
            except (Retryable, WireError):
                doubt = True
                known = [there or None for there in known]
        return known

    def kept(self, pool: LanePool, names: bytes, call: Call) -> list[bool]:
        """For each name that this node has just stored: it, or another one, still has it. True if nobody can say."""
        count = len(names) // NAME_BYTES
        try:
            kept = [tier > 0 for tier in self._present(pool, names, call)]
        except (Retryable, WireError):
            return [True] * count
        gone = [i for i, there in enumerate(kept) if not there]
        found = self._where(_pick(names, gone), call) if gone else None
        own = pool.welcome.node_id if pool.welcome is not None else ""
        if found is not None:
            for row, i in enumerate(gone):
                kept[i] = any(holder[0] != own for holder in found.holders(row))
        return kept

    def remove(self, names: bytes, call: Call) -> list[Outcome]:
        return self._everywhere(names, call, lambda part, op: Remove(op=op, names=part), by_all=True)

    def prefetch(self, names: bytes, call: Call) -> list[Outcome]:
        return self._everywhere(names, call, lambda part, op: Prefetch(op=op, names=part))

    def pin(self, names: bytes, seconds: float, call: Call) -> list[Outcome]:
        """At home, or where the value is."""

        def pin(part: bytes, op: int) -> Message:
            return Pin(op=op, names=part, seconds=seconds)

        outcomes = self._everywhere(names, call, pin)
        left = [i for i, outcome in enumerate(outcomes) if outcome in (Outcome.MISSING, Outcome.UNREACHABLE)]
        if not left:
            return outcomes
        for pool, items in self._elsewhere(names, left, call):
            try:
                answer = ask(pool, pin(_pick(names, items), next(self._ops)), Done, call)
            except (Retryable, WireError):
                continue
            for i, outcome in zip(items, _outcomes(answer.outcomes, len(items), pool), strict=True):
                outcomes[i] = outcome if outcome is not Outcome.MISSING else outcomes[i]
        return outcomes

    def bring_home(self, names: bytes, home: LanePool) -> None:
        """A hint; nothing depends on it."""
        with contextlib.suppress(AnabranchError):
            ask(home, Prefetch(op=next(self._ops), names=names), Done, Call(ASK_S))

    def invalidate(self, tenant: str, epoch: str | None, call: Call) -> dict[str, int]:
        """Raises Unavailable naming every place that could not confirm it."""
        places: dict[str, int] = {}

        def invalidate(pool: LanePool) -> None:
            message = Invalidate(op=next(self._ops), tenant=tenant, epoch=epoch, everywhere=True)
            answer = ask(pool, message, Done, call)
            if Outcome.DENIED in answer.outcomes:
                raise AccessDenied(f"{pool.address}: only a caller with the cluster's secret may name another tenant")
            places.update(answer.places)

        if self._nodes.directory is None:
            for pool in self._nodes.candidates(call):
                try:
                    invalidate(pool)
                except (Retryable, WireError):
                    places[pool.address] = -1  # the others are told all the same
        else:
            self._nodes.exchange(call, invalidate)
        if silent := sorted(place for place, count in places.items() if count < 0):
            raise Unavailable(
                f"not confirmed by {', '.join(silent)}; values there may still be served: invalidate again"
            )
        return places

    def stat(self, call: Call) -> tuple[dict[str, Stat], dict[str, str]]:
        stats: dict[str, Stat] = {}
        silent: dict[str, str] = {}
        pools = {pool.address: pool for pool in [*self._nodes.known, *self._nodes.others(call)]}
        for pool in pools.values():
            try:
                stats[pool.address] = ask(pool, StatRequest(), Stat, call)
            except (Retryable, WireError) as error:
                silent[pool.address] = str(error)
        return stats, silent

    # --- parts ----------------------------------------------------------------------------------------------------

    def _where(self, names: bytes, call: Call) -> Whereabouts | None:
        directory = self._nodes.directory
        if directory is None:
            return None
        try:
            return directory.where(names, timeout_s=max(0.05, min(ASK_S, call.left_s)))
        except (Retryable, WireError):
            return None

    def _present(self, pool: LanePool, names: bytes, call: Call) -> bytes:
        parts = []
        for part in _parts(names):
            answer = ask(pool, Exists(op=next(self._ops), names=part), Presence, call)
            if len(answer.tiers) * NAME_BYTES != len(part):
                raise WireError(f"{pool.address} answers for another number of values than it was asked about")
            parts.append(answer.tiers)
        return b"".join(parts)

    def _merge(self, known: list[bool | None], items: list[int], tiers: bytes, doubt: bool) -> None:
        for i, tier in zip(items, tiers, strict=True):
            if tier:
                known[i] = True
            elif self._nodes.directory is None:
                known[i] = None if doubt else False

    def _everywhere(
        self, names: bytes, call: Call, message: Callable[[bytes, int], Message], *, by_all: bool = False
    ) -> list[Outcome]:
        """At the home node, which tells the others. Without a directory it knows no others: all are told, and the best
        that one says counts; with `by_all` only if none was silent."""
        count = len(names) // NAME_BYTES
        answers: list[list[Outcome]] = []
        silent = False
        for pool in self._nodes.candidates(call):
            try:
                answers.append(self._outcomes(pool, names, call, message))
            except (Retryable, WireError):
                silent = True
                continue
            if self._nodes.directory is not None:
                return answers[0]
        if not answers or (silent and by_all):
            return [Outcome.UNREACHABLE] * count
        return [next((one for one in row if one is Outcome.OK), row[0]) for row in zip(*answers, strict=True)]

    def _outcomes(
        self, pool: LanePool, names: bytes, call: Call, message: Callable[[bytes, int], Message]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for part in _parts(names):
            answer = ask(pool, message(part, next(self._ops)), Done, call)
            outcomes += _outcomes(answer.outcomes, len(part) // NAME_BYTES, pool)
        return outcomes

    def _elsewhere(self, names: bytes, items: list[int], call: Call) -> list[tuple[LanePool, list[int]]]:
        """The nodes that the directory names for these items, one for each item."""
        found = self._where(_pick(names, items), call)
        shares: dict[str, list[int]] = {}
        for row, i in enumerate(items if found is not None else ()):
            holders = found.holders(row) if found is not None else []
            if holders:
                shares.setdefault(min(holders, key=lambda holder: not holder[2] & 1)[1], []).append(i)
        return [(self._nodes.pool(address), share) for address, share in shares.items()]


def _parts(names: bytes) -> Sequence[bytes]:
    step = MAX_ITEMS * NAME_BYTES
    return [names[at : at + step] for at in range(0, len(names), step)]


def _pick(names: bytes, items: Sequence[int]) -> bytes:
    if len(items) * NAME_BYTES == len(names):
        return names
    return b"".join([names[i * NAME_BYTES : (i + 1) * NAME_BYTES] for i in items])


def _outcomes(data: bytes, count: int, pool: LanePool) -> list[Outcome]:
    try:
        outcomes = [Outcome(byte) for byte in data]
    except ValueError as error:
        raise WireError(f"{pool.address} answers with an outcome that nobody knows") from error
    if len(outcomes) != count:
        raise WireError(f"{pool.address} answers for {len(outcomes)} values instead of {count}")
    return outcomes
