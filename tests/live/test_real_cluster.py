"""The default model through the whole product: whatever path a prompt takes, the answer is the same, token by token."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from model_prompts import CHATS, LONG, TEXTS
from openai import OpenAI
from runner_driver import Driver

from anabranch.cluster.live import probes
from anabranch.cluster.live.cluster import LocalCluster
from anabranch.cluster.settings import Settings

pytestmark = [pytest.mark.model, pytest.mark.cluster, pytest.mark.timeout(300)]
STEPS = 24
STORY = f"{LONG[:1500]}\n\nIn short, the ferry"
SUMMARY = f"{LONG[1500:3000]}\n\nThe busiest day was"
LONG_STEPS = 96
PROMPTS = [STORY, SUMMARY, *TEXTS[4:8], TEXTS[11], TEXTS[13]]


@pytest.fixture(scope="module")
def tokenizer(prepared_model: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=str(prepared_model / "tokenizer.json"))


@pytest.fixture(scope="module")
def driver(prepared_model: Path) -> Iterator[Driver]:
    """A bare runner: no cache, no cluster. test_torch_runner compares its answers with transformers."""
    made = Driver(prepared_model, 200)
    yield made
    made.close()


def greedy(driver: Driver, tokenizer: Any, prompts: list[str], steps: int) -> list[str]:
    states = []
    for prompt in map(tokenizer.encode, prompts):
        pages = driver.pages(len(prompt) + steps)
        states.append((driver.feed(prompt, pages).tokens[0], len(prompt), pages))
    answers = driver.continue_all(states, steps - 1)
    for _, _, pages in states:
        driver.free += pages
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]


@pytest.fixture(scope="module")
def expected(driver: Driver, tokenizer: Any) -> list[str]:
    return greedy(driver, tokenizer, PROMPTS, STEPS)


@pytest.fixture(scope="module")
def expected_long(driver: Driver, tokenizer: Any) -> list[str]:
    """Long answers to short prompts: they grow until the pages run out."""
    return greedy(driver, tokenizer, TEXTS, LONG_STEPS)


def start(prepared: Path, folder: Path, *, blocks: int = 600, step_tokens: int = 512, **shape: int) -> LocalCluster:
    base = Settings()
    replace = msgspec.structs.replace
    slot_bytes = 16 * 46_080
    return LocalCluster(
        replace(
            base,
            model=replace(base.model, prepared=str(prepared), served_name="smol"),
            cluster=replace(
                base.cluster, name="real", run_dir=str(folder / "run"), data_dir=str(folder / "data"), **shape
            ),
            engine=replace(base.engine, step_tokens=step_tokens),
            node=replace(base.node, dram_bytes=blocks * slot_bytes, ssd_bytes=1 << 30),
            gateway=replace(base.gateway, port=0, drain_timeout_s=5.0),
        )
    )


class Asker:
    """The official client; answers and where their prompts came from."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=120, max_retries=0)

    def ask(self, prompt: str, **more: Any) -> tuple[str, dict[str, int]]:
        body = {"max_tokens": STEPS, "temperature": 0, "extra_body": {"ignore_eos": True}, **more}
        answer = self.client.completions.create(model="smol", prompt=prompt, **body)
        usage = answer.usage.model_dump()  # type: ignore[union-attr]
        tiers: dict[str, int] = usage["anabranch"]
        assert sum(tiers.values()) == usage["prompt_tokens"]
        texts = {choice.text for choice in answer.choices}
        assert len(texts) == 1, texts
        return texts.pop(), tiers

    def ask_all(self, prompts: list[str] = PROMPTS, **more: Any) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [text for text, _ in pool.map(lambda prompt: self.ask(prompt, **more), prompts)]

    def close(self) -> None:
        self.client.close()


@pytest.fixture
def asker() -> Iterator[Callable[[LocalCluster], Asker]]:
    made: list[Asker] = []

    def make(cluster: LocalCluster) -> Asker:
        made.append(Asker(cluster))
        return made[-1]

    yield make
    for one in made:
        one.close()


def idle(cluster: LocalCluster) -> bool:
    """Nothing runs, waits, or holds a slot."""
    keys = ("waiting", "running", "reserved_slots", "inbound", "outbound")
    return not any(counts.get(key, 0) for counts in cluster.census().values() for key in keys)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_hand_off_memory_and_disk_give_the_same_answers(
    prepared_model: Path, tmp_path: Path, expected: list[str], asker: Callable[[LocalCluster], Asker], tokenizer: Any
) -> None:
    with start(prepared_model, tmp_path) as cluster:
        client = asker(cluster)
        cold, tiers = client.ask(STORY)
        assert (cold, tiers["dram"] + tiers["ssd"] + tiers["peer"]) == (expected[0], 0)
        warm, tiers = client.ask(STORY)
        assert warm == expected[0]
        assert tiers["dram"] > 400
        assert client.ask_all() == expected
        assert client.ask(STORY, n=4)[0] == expected[0]
        template = msgspec.json.decode((prepared_model / "tokenizer_config.json").read_bytes())["chat_template"]
        tokenizer.chat_template = template
        for chat in CHATS:
            ours = httpx.post(f"{cluster.url}/tokenize", json={"messages": chat}).json()["tokens"]
            assert ours == tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        wait_until(lambda: idle(cluster), "something is left behind")
        assert cluster.resident_bytes() < 3 << 30
    with start(prepared_model, tmp_path) as cluster:
        client = asker(cluster)
        text, tiers = client.ask(STORY)
        assert text == expected[0]
        assert tiers["ssd"] + tiers["peer"] > 400
        assert client.ask_all() == expected


def test_preemption_small_chunks_and_another_node_give_the_same_answers(
    prepared_model: Path,
    tmp_path: Path,
    expected: list[str],
    expected_long: list[str],
    asker: Callable[[LocalCluster], Asker],
) -> None:
    with start(prepared_model, tmp_path, blocks=50, step_tokens=33, prefill=0, decode=0, both=2) as cluster:
        client = asker(cluster)
        assert client.ask_all() == expected
        assert client.ask_all(TEXTS, max_tokens=LONG_STEPS) == expected_long
        wait_until(lambda: idle(cluster), "something is left behind")
        loads = [probes.engine_load(member.engine_address) for member in cluster.spec.members]
        assert sum(load.preemptions for load in loads) > 0
        assert client.ask(SUMMARY)[0] == expected[1]
        held = {name: counts["cached_slots"] for name, counts in cluster.census().items() if name.endswith("-node")}
        holder = max(held, key=lambda name: held[name]).removesuffix("-node")
        cluster.signal(holder, signal.SIGSTOP)
        try:
            text, tiers = client.ask(SUMMARY)
        finally:
            cluster.signal(holder, signal.SIGCONT)
        assert text == expected[1]
        assert tiers["peer"] + tiers["ssd"] + tiers["dram"] > 0
