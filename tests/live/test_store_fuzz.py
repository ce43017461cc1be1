"""Hostile frames at a node and a directory with secrets (`make fuzz` runs a million)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from anabranch.core.errors import WireError
from anabranch.core.wire import FrameDecoder
from anabranch.store.values.messages import ClientToNode
from anabranch.testing.frames import Mutator
from anabranch.testing.live.store_fuzz import Secrets, fuzz_directory, fuzz_node
from anabranch.testing.live.targets import Targets
from anabranch.testing.store_frames import Known, NodeMessages

pytestmark = pytest.mark.cluster
GROWTH_LIMIT = 64 << 20


def test_a_node_and_a_directory_survive_hostile_frames(tmp_path: Path) -> None:
    secret = Secrets.fresh()
    with Targets(tmp_path, secret) as targets:
        for name, fuzz, frames in (("node", fuzz_node, 3000), ("directory", fuzz_directory, 2000)):
            result = fuzz(targets.addresses[name], targets.pids[name], secret, frames=frames, seed=7)
            assert result.problems == [], targets.log(name)
            assert targets.tracebacks(name) == []
            assert result.grown_bytes <= GROWTH_LIMIT
            assert result.report.total >= frames
            assert result.report.answered > 1000
            assert len(result.report.frames) > 10, "hardly a kind of frame was sent"


def test_mutated_frames_are_decoded_or_refused_and_nothing_else() -> None:
    known = Known(names=[bytes([number]) * 32 for number in range(4)], foreign=[bytes(32)], scopes=[bytes(16)])
    mutator = Mutator(1, NodeMessages(known).makers())
    outcomes = {"decoded": 0, "refused": 0, "incomplete": 0}
    for _ in range(3000):
        frame = mutator.next()
        decoder: FrameDecoder[object] = FrameDecoder(ClientToNode)
        try:
            messages = decoder.feed(frame.data)
        except WireError:
            outcomes["refused"] += 1
            assert frame.kind not in ("valid", "unknown fields")
            continue
        outcomes["decoded" if messages else "incomplete"] += 1
    assert all(count > 50 for count in outcomes.values())


def test_frames_follow_from_the_seed() -> None:
    known = Known(names=[bytes(32)], foreign=[bytes(32)], scopes=[bytes(16)])

    def first(seed: int) -> list[bytes]:
        mutator = Mutator(seed, NodeMessages(msgspec.structs.replace(known)).makers())
        return [mutator.next().data for _ in range(200)]

    assert first(1) == first(1) != first(2)
