"""Plays the node and the runner for one `EngineCore`, action by action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from anabranch.blocks.hashing import prefix_keys
from anabranch.core.messages import Message
from anabranch.engine.actions import Acquire, Action, Commit, Free, PushLayer, Reserve, Send
from anabranch.engine.config import EngineConfig
from anabranch.engine.kv_port import Acquired, Reserved
from anabranch.engine.messages import StepOutput, Submit, TokenEvent
from anabranch.engine.request import EngineRequest, SamplingParams
from anabranch.engine.runner import Sampled
from anabranch.engine.scheduler import EngineCore
from anabranch.engine.step import Step
from anabranch.engine.tripwire import tripwire_info

BLOCK = 4
ROOT, KEY = b"r" * 32, b"k" * 32
A = TypeVar("A")


def request(name: str, prompt: int | list[int], *, n: int = 1, deadline_s: float = 100.0, **sampling: Any) -> Any:
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return EngineRequest(
        request_id=name, tokens=tokens, sampling=params, n=n, root=ROOT, hash_key=KEY, deadline_s=deadline_s
    )


def keys(tokens: Sequence[int]) -> list[bytes]:
    return prefix_keys(ROOT, KEY, BLOCK, tokens)


class Script:
    """`todo`: actions not answered yet; `sent`: messages to the gateway. Slots are handed out from 0 upwards."""

    def __init__(self, slots: int = 64, *, layers: int = 2, **config: Any) -> None:
        settings = {"block_tokens": BLOCK, "step_tokens": 64, "spare_slots": 2, **config}
        info = tripwire_info(layers=layers, block_tokens=BLOCK, context_tokens=200, vocab=1000)
        self.core = EngineCore("e", info, EngineConfig(**settings), total_slots=slots)
        self.free = list(range(slots))
        self.todo: list[Action] = []
        self.sent: list[Message] = []
        self.commits: list[Any] = []
        self.pushes: list[PushLayer] = []
        self.now = 0.0
        self.token = 100

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self.sent.append(action.message)
                case Free():
                    self.free.extend(action.slots)
                case Commit():
                    self.commits.extend(action.blocks)
                case PushLayer():
                    self.pushes.append(action)
                case _:
                    self.todo.append(action)

    def tell(self, event: Any) -> None:
        self.take(self.core.handle(event, self.now))

    def expire(self) -> None:
        self.take(self.core.expire(self.now))

    def submit(self, name: str, prompt: int | list[int], **options: Any) -> None:
        self.tell(Submit(request=request(name, prompt, **options)))

    def next(self, kind: type[A]) -> A:
        """The oldest unanswered action of a kind, taken off the list."""
        for action in self.todo:
            if isinstance(action, kind):
                self.todo.remove(action)  # type: ignore[arg-type]
                return action
        raise AssertionError(f"no {kind.__name__} in {self.todo}")

    def acquired(self, ready: int = 0, loading: int = 0) -> Acquire:
        acquire = self.next(Acquire)
        slots = [self.free.pop(0) for _ in range(ready + loading)]
        self.tell(Acquired(op=acquire.op, ready=slots[:ready], loading=slots[ready:]))
        return acquire

    def reserved(self, *, grant: bool = True) -> Reserve:
        reserve = self.next(Reserve)
        if grant and reserve.count <= len(self.free):
            slots, self.free = self.free[: reserve.count], self.free[reserve.count :]
        else:
            slots = []
        self.tell(Reserved(op=reserve.op, slots=slots))
        return reserve

    def answer_all(self) -> None:
        """Misses for every lookup, grants for every reservation while slots last."""
        while any(isinstance(action, Acquire | Reserve) for action in self.todo):
            if any(isinstance(action, Acquire) for action in self.todo):
                self.acquired()
            else:
                self.reserved()

    def start(self, name: str, prompt: int | list[int], **options: Any) -> None:
        """Submit and admit, nothing cached."""
        self.submit(name, prompt, **options)
        self.answer_all()

    def plan(self) -> Step:
        step = self.core.plan(self.now)
        assert step is not None
        return step

    def finish(self, step: Step, tokens: Sequence[int] | None = None, broken: Sequence[int] = ()) -> list[TokenEvent]:
        """Answer a step: `tokens` in order, or fresh ones."""
        given = iter(tokens or ())
        answers = []
        for chunk in step.chunks:
            drawn = [next(given, None) or self._fresh() for _ in range(chunk.sample)]
            if chunk.sample:
                answers.append(Sampled(chunk.seq, drawn))
        before = len(self.sent)
        self.take(self.core.finish(step, answers, self.now, broken))
        return [event for m in self.sent[before:] if isinstance(m, StepOutput) for event in m.tokens]

    def _fresh(self) -> int:
        self.token += 1
        return self.token

    def step(self, tokens: Sequence[int] | None = None) -> list[TokenEvent]:
        self.expire()
        self.answer_all()
        return self.finish(self.plan(), tokens)

    def idle(self) -> None:
        self.answer_all()
        assert not any(self.core.census().values()), self.core.census()
