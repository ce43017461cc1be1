"""The torch engine beside transformers' `generate`: same weights, float32, same threads, alternating in one run.

    python benchmarks/engine_speed.py [--quick] [--json] [--threads N] [--model SOURCE] [--kernels auto|native|torch]

    prefill-1024, prefill-2048   prompt tokens per second                                    target ≥ 1.1 × peer
    decode-1                     tokens per second of one sequence, 32-token prompt          target ≥ 1.3 × peer
    decode-8                     of eight sequences together; the peer's are one by one      target ≥ 5 × peer
    turn-4000                    (full run) 50 new tokens on 4,000 cached ones, against 50 alone: seconds, no peer

`limit` is what the machine allows: the measured rate of a large matrix product over the flops of the linear layers for
prefill (attention is not counted), and the measured memory bandwidth over the bytes of the weights for decode. The last
line is JSON; with `--json` it is the only one. Figures are medians, ratios the median of the ratios of neighbouring
samples; on a busy machine trust the ratios only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anabranch.engine.live.model.hf_export import hf_tensors
from anabranch.engine.live.model_files import load_model_info, load_shape, read_json
from anabranch.engine.live.prepare import prepare
from anabranch.engine.live.torch_runner import TorchRunner
from anabranch.engine.request import SamplingParams
from anabranch.engine.runner import Chunk, OpenGate

GREEDY = SamplingParams(temperature=0.0)
STEP_TOKENS, PROMPT, CONTEXT, TURN, SEQUENCES = 512, 32, 4000, 50, 8
BLOCK = 16
LINE = "{name:13} ours {ours:8.1f}  peer {peer:8.1f}  ratio {ratio:5.2f} (target {target})  limit {limit:8.1f} tok/s"
TARGETS = {"prefill-1024": 1.1, "prefill-2048": 1.1, "decode-1": 1.3, "decode-8": 5.0}


class Ours:
    def __init__(self, prepared: Path, threads: int, kernels: Any) -> None:
        layout = load_model_info(prepared).layout
        self._pages = -(-(CONTEXT + 2 * TURN) // BLOCK)
        self._memory = memoryview(bytearray(2 * self._pages * layout.full_block_bytes))
        self.runner = TorchRunner(prepared, self._memory, threads=threads, kernels=kernels)
        self._threads = torch.get_num_threads()

    def prefill(self, tokens: list[int], start: int = 0) -> int:
        torch.set_num_threads(self._threads)
        pages, end = list(range(self._pages)), start + len(tokens)
        answer = 0
        for at in range(start, end, STEP_TOKENS):
            part = tokens[at - start : at - start + STEP_TOKENS]
            chunk = Chunk(seq=0, tokens=part, start=at, pages=pages, sample=int(at + len(part) == end), params=GREEDY)
            for sampled in self.runner.run([chunk], OpenGate()):
                answer = sampled.tokens[0]
        return answer

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        torch.set_num_threads(self._threads)
        share = 2 * self._pages // len(prompts)
        tables = [list(range(i * share, (i + 1) * share)) for i in range(len(prompts))]
        answers: list[list[int]] = [[] for _ in prompts]
        for step in range(new):
            batch = [
                Chunk(
                    seq=i,
                    tokens=answers[i][-1:] if step else prompt,
                    start=len(prompt) + step - 1 if step else 0,
                    pages=tables[i],
                    sample=1,
                    params=GREEDY,
                )
                for i, prompt in enumerate(prompts)
            ]
            for answer, sampled in zip(answers, self.runner.run(batch, OpenGate()), strict=True):
                answer += sampled.tokens
        return answers


class Peer:
    def __init__(self, prepared: Path, threads: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.for_model(**read_json(prepared / "config.json"))
            auto: Any = AutoModelForCausalLM
            self._model = auto.from_config(config).float().eval()
        tensors = {name: torch.from_numpy(array) for name, array in hf_tensors(prepared).items()}
        self._model.load_state_dict(tensors, strict=False, assign=True)
        self._model.tie_weights()
        self._model.generation_config.eos_token_id = None
        self._threads = threads

    def generate(self, prompt: list[int], new: int) -> list[int]:
        torch.set_num_threads(self._threads)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def tokens(count: int, shift: int = 0) -> list[int]:
    """A fixed, varied token sequence."""
    return [1000 + (i * 7919 + shift * 104729) % 40000 for i in range(count)]


def alternate(
    name: str, work: int, ours: Callable[[], Any], peer: Callable[[], Any], peer_work: int, rounds: int
) -> Any:
    """Rates of both sides, measured in turn after one warm-up each."""
    ours()
    peer()
    pairs = [(work / timed(ours), peer_work / timed(peer)) for _ in range(rounds)]
    mine, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    return {
        "name": name,
        "ours": round(mine, 2),
        "peer": round(theirs, 2),
        "ratio": round(statistics.median(a / b for a, b in pairs), 2),
        "target": TARGETS[name],
        "samples": [[round(a, 2), round(b, 2)] for a, b in pairs],
    }


def matmul_flops(threads: int) -> float:
    torch.set_num_threads(threads)
    a, b = torch.randn(2048, 1024), torch.randn(1024, 2048)
    torch.mm(a, b)
    return 2 * 2048 * 1024 * 2048 / min(timed(lambda: torch.mm(a, b)) for _ in range(7))


def memory_bandwidth(threads: int) -> float:
    torch.set_num_threads(threads)
    data = torch.ones(64 << 20)
    data.sum()
    return data.nbytes / min(timed(data.sum) for _ in range(7))


class Machine:
    """The best rates seen so far; looked at several times in a run because other work comes and goes."""

    def __init__(self, threads: int) -> None:
        self.flops, self.bandwidth, self._threads = 0.0, 0.0, threads

    def look(self) -> None:
        self.flops = max(self.flops, matmul_flops(self._threads))
        self.bandwidth = max(self.bandwidth, memory_bandwidth(self._threads))

    def limits(self, prepared: Path) -> dict[str, float]:
        shape = load_shape(prepared)
        attention = shape.hidden * (2 * shape.q_size + 2 * shape.kv_size)
        linear = shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
        weights = linear + shape.vocab * shape.hidden
        prefill = self.flops / (2 * linear)
        step, compute = 4 * weights / self.bandwidth, 2 * weights / self.flops
        return {
            "prefill-1024": prefill,
            "prefill-2048": prefill,
            "decode-1": 1 / max(step, compute),
            "decode-8": SEQUENCES / max(step, SEQUENCES * compute),
        }


def measure(prepared: Path, threads: int, kernels: str, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    machine, ours, peer = Machine(threads), Ours(prepared, threads, kernels), Peer(prepared, threads)
    new, rounds = (24, 3) if quick else (64, 5)
    prompts = [tokens(PROMPT, i) for i in range(SEQUENCES)]
    long = {count: tokens(count) for count in (1024, 2048)}
    same = ours.generate(prompts[:1], new)[0] == peer.generate(prompts[0], new)
    cases: list[tuple[str, int, Callable[[], Any], Callable[[], Any], int]] = [
        ("prefill-1024", 1024, lambda: ours.prefill(long[1024]), lambda: peer.generate(long[1024], 1), 1024),
        ("prefill-2048", 2048, lambda: ours.prefill(long[2048]), lambda: peer.generate(long[2048], 1), 2048),
        ("decode-1", new, lambda: ours.generate(prompts[:1], new), lambda: peer.generate(prompts[0], new), new),
        ("decode-8", SEQUENCES * new, lambda: ours.generate(prompts, new), lambda: peer.generate(prompts[1], new), new),
    ]
    figures = []
    for case in cases:
        machine.look()
        figures.append(alternate(*case, rounds))
    machine.look()
    bounds = machine.limits(prepared)
    for figure in figures:
        figure["limit"] = round(bounds[figure["name"]], 2)
        say(LINE.format(**figure))
    say(f"machine: {machine.flops / 1e9:.0f} GFLOP/s, {machine.bandwidth / 1e9:.1f} GB/s, {threads} threads")
    result = {"claim": "engine speed", "unit": "tokens/s", "figures": figures, "same_tokens": same}
    result |= {"gflops": round(machine.flops / 1e9, 1), "bandwidth_gb_s": round(machine.bandwidth / 1e9, 1)}
    if not quick:
        result["turn"] = turn(ours, say)
    ours.runner.close()
    return result


def turn(ours: Ours, say: Callable[[str], None]) -> dict[str, float]:
    """Seconds for 50 new tokens after 4,000 cached ones and after none."""
    ours.prefill(tokens(CONTEXT))
    after = statistics.median(timed(lambda: ours.prefill(tokens(TURN, 3), CONTEXT)) for _ in range(5))
    alone = statistics.median(timed(lambda: ours.prefill(tokens(TURN, 3))) for _ in range(5))
    say(f"turn-4000     {TURN} tokens on {CONTEXT}: {after * 1e3:.0f} ms; alone: {alone * 1e3:.0f} ms")
    return {"after_context_s": round(after, 4), "alone_s": round(alone, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens and rounds")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="default", help="as for `anabranch up`")
    parser.add_argument("--kernels", default="auto", choices=("auto", "native", "torch"))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "anabranch" / "models")
    options = parser.parse_args()
    say: Callable[[str], None] = (
        (lambda line: None) if options.json else lambda line: print(line, file=sys.stdout, flush=True)
    )
    prepared = prepare(options.model, options.cache)
    result = measure(prepared, options.threads, options.kernels, options.quick, say)
    machine = {"cpu": platform.processor() or platform.machine(), "isa": torch.backends.cpu.get_cpu_capability()}
    print(json.dumps({**result, "threads": options.threads, "machine": machine, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
