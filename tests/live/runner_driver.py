"""Drives a TorchRunner the way the scheduler does, and builds the transformers model on the same weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from anabranch.engine.live.model.hf_export import hf_tensors
from anabranch.engine.live.model_files import load_model_info, read_json
from anabranch.engine.live.torch_runner import TorchRunner
from anabranch.engine.request import SamplingParams
from anabranch.engine.runner import Chunk, OpenGate, Sampled

GREEDY = SamplingParams(temperature=0.0)


class Driver:
    """One runner over `slots` private pages, handed out in a scattered order."""

    def __init__(self, prepared: Path, slots: int, **options: Any) -> None:
        kinds = {k: v for k, v in options.items() if k in ("kv_dtype", "block_tokens")}
        self.layout = load_model_info(prepared, **kinds).layout
        self.memory = memoryview(bytearray(slots * self.layout.full_block_bytes))
        self.runner = TorchRunner(prepared, self.memory, **options)
        # A large stride with no common factor with any slot count here: neighbours in a block table are far apart.
        self.free = [(i * 7919) % slots for i in range(slots)]
        assert len(set(self.free)) == slots

    def close(self) -> None:
        self.runner.close()
        self.memory.release()

    def pages(self, tokens: int) -> list[int]:
        count = -(-tokens // self.layout.block_tokens)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def feed(
        self, tokens: list[int], pages: list[int], start: int = 0, chunk: int = 0, params: SamplingParams = GREEDY
    ) -> Sampled:
        """Compute `tokens` from `start` in chunks; sample after the last."""
        end, size = start + len(tokens), chunk or len(tokens)
        answers: list[Sampled] = []
        for at in range(start, end, size):
            part = tokens[at - start : at - start + size]
            last = at + len(part) == end
            piece = Chunk(seq=0, tokens=part, start=at, pages=pages, sample=int(last), params=params)
            answers += self.runner.run([piece], OpenGate())
        return answers[-1]

    def continue_all(self, states: list[tuple[int, int, list[int]]], steps: int) -> list[list[int]]:
        """Greedy tokens of all sequences (first token, its position, pages), decoded in one batch."""
        answers = [[token] for token, _, _ in states]
        for step in range(steps):
            batch = [
                Chunk(seq=i, tokens=[answers[i][-1]], start=at + step, pages=pages, sample=1, params=GREEDY)
                for i, (_, at, pages) in enumerate(states)
            ]
            for i, sampled in enumerate(self.runner.run(batch, OpenGate())):
                answers[i].append(sampled.tokens[0])
        return answers

    def greedy(self, prompt: list[int], steps: int, chunk: int = 0) -> list[int]:
        pages = self.pages(len(prompt) + steps)
        first = self.feed(prompt, pages, chunk=chunk).tokens[0]
        answer = self.continue_all([(first, len(prompt), pages)], steps - 1)[0]
        self.free += pages
        return answer


def transformers_model(prepared: Path) -> Any:
    """transformers' own implementation, on copies of the prepared weights."""
    # One thread: the barriers of several cost far more than they save when other tests share the cores.
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoConfig, AutoModelForCausalLM

        config = read_json(prepared / "config.json")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).float().eval()
        tensors = {name: torch.from_numpy(array) for name, array in hf_tensors(prepared).items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights()
    assert not unexpected
    assert not missing
    return model
