"""The default model on our engine: equal to transformers, and to itself however the work is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from model_prompts import CHATS, LONG, TEXTS
from runner_driver import GREEDY, Driver, transformers_model

from anabranch.core.errors import ConfigError, InvariantBroken
from anabranch.engine.live.model_files import load_model_info, read_json
from anabranch.engine.live.torch_runner import TorchRunner
from anabranch.engine.request import SamplingParams
from anabranch.engine.runner import Chunk, OpenGate

pytestmark = pytest.mark.model
STEPS = 64
TIE = 1e-3  # two logits nearer than this may swap when additions are ordered differently
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def driver(prepared_model: Path) -> Iterator[Driver]:
    made = Driver(prepared_model, 450)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(prepared_model: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(prepared_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(prepared_model: Path, tokenizer: Any) -> list[list[int]]:
    import jinja2

    source = read_json(prepared_model / "tokenizer_config.json")["chat_template"]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    texts = [template.render(messages=chat, add_generation_prompt=True) for chat in CHATS] + TEXTS
    return [tokenizer.encode(text).ids for text in texts]


@pytest.mark.timeout(300)
def test_greedy_equals_transformers(
    prepared_model: Path, driver: Driver, prompts: list[list[int]], record_property: Any
) -> None:
    """Every position is checked by one teacher-forced pass of transformers over prompt and answer."""
    assert len(prompts) >= 30
    assert max(map(len, prompts)) >= 1500
    states = []
    for prompt in prompts:
        pages = driver.pages(len(prompt) + STEPS)
        states.append((driver.feed(prompt, pages, chunk=512).tokens[0], len(prompt), pages))
    answers = driver.continue_all(states, STEPS - 1)
    for _, _, pages in states:
        driver.free += pages
    ties = flipped_ties(prepared_model, prompts, answers)
    record_property("comparison", f"{len(prompts) * STEPS} tokens equal, {ties} ties within {TIE} flipped")


def flipped_ties(prepared: Path, prompts: list[list[int]], answers: list[list[int]]) -> int:
    """How many of our tokens are not transformers' first choice but within TIE of it; others fail the test."""
    model, ties = transformers_model(prepared), 0
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = model(torch.tensor([prompt + answer[:-1]]), logits_to_keep=STEPS).logits[0]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            behind = logits.max(dim=1).values - chosen
            assert float(behind.max()) <= TIE, f"token {int(behind.argmax())} of prompt {prompt[:8]}… differs"
            ties += int((behind > 0).sum())
    return ties


def test_chunking_changes_nothing(driver: Driver, prompts: list[list[int]]) -> None:
    prompt = next(p for p in prompts if 60 < len(p) < 200)
    whole = driver.greedy(prompt, 12)
    for chunk in (1, 7, 16, 33):
        assert driver.greedy(prompt, 12, chunk=chunk) == whole


def test_batch_mates_change_nothing(driver: Driver, prompts: list[list[int]]) -> None:
    """A decode step, a fresh prompt and a chunk in the middle of another, all in one batch."""
    alone = [driver.greedy(prompt, 8) for prompt in prompts[:6]]
    spaces = [driver.pages(len(prompt) + 8) for prompt in prompts[:6]]
    for i, prompt in enumerate(prompts[:6]):
        driver.feed(prompt[: len(prompt) // 2], spaces[i])
    batch = [
        Chunk(seq=i, tokens=p[len(p) // 2 :], start=len(p) // 2, pages=spaces[i], sample=1, params=GREEDY)
        for i, p in enumerate(prompts[:6])
    ]
    firsts = [sampled.tokens[0] for sampled in driver.runner.run(batch, OpenGate())]
    states = [(firsts[i], len(prompts[i]), spaces[i]) for i in range(6)]
    assert driver.continue_all(states, 7) == alone
    for pages in spaces:
        driver.free += pages


def test_a_cached_prefix_changes_nothing(driver: Driver, tokenizer: Any) -> None:
    """Another request computed the shared blocks; ours computes only what follows."""
    prompt = tokenizer.encode(LONG).ids[:400]
    expected = driver.greedy(prompt, 8)
    theirs = driver.pages(400)
    driver.feed(prompt[:320] + prompt[:40], theirs)
    ours = theirs[: 320 // driver.layout.block_tokens] + driver.pages(88)
    first = driver.feed(prompt[320:], ours, start=320).tokens[0]
    assert driver.continue_all([(first, 400, ours)], 7)[0] == expected
    driver.free += list({*theirs, *ours})


def test_choices_fork_from_one_prompt(driver: Driver, prompts: list[list[int]]) -> None:
    """n=4: first tokens drawn together; the partial block is copied; each choice goes on as if it were alone."""
    prompt = prompts[0]
    params = SamplingParams(temperature=1.5, seed=11)
    pages = driver.pages(len(prompt) + 8)
    chunk = Chunk(seq=0, tokens=prompt, start=0, pages=pages, sample=4, params=params)
    firsts = driver.runner.run([chunk], OpenGate())[0].tokens
    one_by_one = [
        driver.runner.run(
            [Chunk(seq=0, tokens=prompt, start=0, pages=pages, sample=1, first_choice=i, params=params)], OpenGate()
        )
        for i in range(4)
    ]
    assert firsts == [answer[0].tokens[0] for answer in one_by_one]
    size = driver.layout.block_tokens
    full, partial = len(prompt) // size, len(prompt) % size
    assert partial
    forks = []
    for _ in range(3):
        own = driver.pages(len(prompt) + 8 - full * size)
        driver.runner.copy_page(pages[full], own[0], partial)
        forks.append(pages[:full] + own)
    states = [(firsts[i], len(prompt), table) for i, table in enumerate([pages, *forks])]
    together = driver.continue_all(states, 7)
    for i, first in enumerate(firsts):
        fresh = driver.pages(len(prompt) + 8)
        driver.feed(prompt, fresh)
        assert driver.continue_all([(first, len(prompt), fresh)], 7)[0] == together[i]
        driver.free += fresh
    driver.free += list({page for _, _, table in states for page in table})


def test_plain_torch_agrees_with_compiled_kernels(prepared_model: Path, prompts: list[list[int]]) -> None:
    native, plain = Driver(prepared_model, 40, kernels="native"), Driver(prepared_model, 40, kernels="torch")
    prompt = prompts[5]
    params = SamplingParams(temperature=0.0, logprobs=5)
    answers = [d.feed(prompt, list(range(20)), chunk=50, params=params) for d in (native, plain)]
    assert answers[0].tokens == answers[1].tokens
    for ours, theirs in zip(answers[0].logprobs or [], answers[1].logprobs or [], strict=True):
        assert [i for i, _ in ours.top] == [i for i, _ in theirs.top]
        assert [v for _, v in ours.top] == pytest.approx([v for _, v in theirs.top], abs=TOLERANCE)
    used = 20 * native.layout.full_block_bytes
    pages = [torch.frombuffer(d.memory[:used], dtype=torch.float32) for d in (native, plain)]
    torch.testing.assert_close(pages[0], pages[1], atol=TOLERANCE, rtol=1e-3)
    del pages
    native.close()
    plain.close()


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16"])
def test_half_precision_pages(prepared_model: Path, prompts: list[list[int]], kv_dtype: str) -> None:
    """K/V is rounded where it is written, so both implementations see the same values."""
    drivers = [Driver(prepared_model, 40, kernels=k, kv_dtype=kv_dtype, block_tokens=8) for k in ("native", "torch")]
    params = SamplingParams(temperature=0.0, logprobs=3)
    one, other = (d.feed(prompts[4], list(range(25)), chunk=20, params=params) for d in drivers)
    assert one.tokens == other.tokens
    assert one.logprobs
    assert other.logprobs
    assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=0.02)
    for driver in drivers:
        driver.close()


def test_the_gate_sees_every_layer_in_order(driver: Driver, prompts: list[list[int]]) -> None:
    calls: list[tuple[str, int]] = []

    class Recorder:
        def wait(self, layer: int) -> None:
            calls.append(("wait", layer))

        def done(self, layer: int) -> None:
            calls.append(("done", layer))

    driver.runner.run([Chunk(seq=0, tokens=prompts[0], start=0, pages=list(range(10)))], Recorder())
    assert calls == [(name, layer) for layer in range(30) for name in ("wait", "done")]


def test_impossible_chunks_and_devices_are_refused(prepared_model: Path, driver: Driver) -> None:
    for bad in (
        Chunk(seq=1, tokens=[], start=0, pages=[0]),
        Chunk(seq=1, tokens=[1] * 17, start=0, pages=[0]),
        Chunk(seq=1, tokens=[1], start=0, pages=[10_000]),
        Chunk(seq=1, tokens=[49152], start=0, pages=[0]),
        Chunk(seq=1, tokens=[1], start=8192, pages=[0] * 600),
    ):
        with pytest.raises(InvariantBroken):
            driver.runner.run([bad], OpenGate())
    with pytest.raises(ConfigError, match="cuda"):
        TorchRunner(prepared_model, memoryview(bytearray(64)), device="cuda")
    with pytest.raises(ConfigError, match="enlarge"):
        TorchRunner(prepared_model, memoryview(bytearray(64)))


def test_model_info(prepared_model: Path) -> None:
    info = load_model_info(prepared_model, "float32", 16)
    assert (info.layout.layers, info.layout.kv_heads, info.layout.head_dim) == (30, 3, 64)
    assert (info.context_tokens, info.vocab, info.eos_token_ids) == (8192, 49152, (2,))
    assert info.name == "SmolLM2-135M-Instruct"
    assert len(info.digest) == 32


@pytest.mark.parametrize(
    "text", ["1234", "a1b22c333", "Größe – naïve", "日本語テキスト", "مرحبا", "नमस्ते", "🌊🚢", " \n\t x"]
)
def test_the_tokenizer_round_trips(tokenizer: Any, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids) == text
    assert all(sum(c.isdigit() for c in token) <= 1 for token in encoded.tokens)
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
