from __future__ import annotations

import math

import pytest
import torch

from anabranch.engine.live.sampler import sample, uniform
from anabranch.engine.request import SamplingParams
from anabranch.engine.runner import Chunk

PROBABILITIES = torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1])
LOGITS = PROBABILITIES.log()


def draw(
    logits: torch.Tensor,
    n: int = 1,
    start: int = 9,
    history: list[int] | None = None,
    prompt: int = 0,
    **params: object,
) -> list[int]:
    settings = SamplingParams(**params)  # type: ignore[arg-type]
    chunk = Chunk(
        seq=3, tokens=[1], start=start, pages=[], sample=n, params=settings, history=history, prompt_tokens=prompt
    )
    return sample([chunk], logits[None].clone(), (0,))[0].tokens


def shares(n: int = 4000, **params: object) -> list[float]:
    tokens = draw(LOGITS, n=n, seed=42, **params)
    return [tokens.count(i) / n for i in range(len(LOGITS))]


def test_uniform_numbers_depend_on_all_three_and_nothing_else() -> None:
    assert uniform(1, 2, 3) == uniform(1, 2, 3)
    assert len({uniform(*key) for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (-1, 2, 3)]}) == 5
    mean = sum(uniform(7, 0, i) for i in range(4000)) / 4000
    assert mean == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.05, 0.4, 0.3, 0.15, 0.1]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.65}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0, 0]),
        ({"min_p": 0.5}, [0, 4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 4, "top_p": 0.85}, [0, 8 / 17, 6 / 17, 3 / 17, 0]),
        ({"temperature": 0.5}, [p * p / 0.285 for p in (0.05, 0.4, 0.3, 0.15, 0.1)]),
        ({"logit_bias": {1: -100.0}}, [0.05 / 0.6, 0, 0.5, 0.25, 1 / 6]),
    ],
)
def test_distributions(params: dict[str, object], expected: list[float]) -> None:
    assert shares(**params) == pytest.approx(expected, abs=0.03)


def test_truncation_agrees_with_a_full_sort_on_a_large_vocabulary() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5000, generator=generator)
    ranked = logits.softmax(-1).sort(descending=True)
    for top_p in (0.01, 0.3, 0.9, 0.999):
        count = int((ranked.values.cumsum(-1) - ranked.values < top_p).sum())
        assert set(draw(logits, n=300, seed=1, top_p=top_p)) <= set(ranked.indices[:count].tolist())
    assert set(draw(logits, n=300, seed=1, top_k=3)) == set(ranked.indices[:3].tolist())


def test_draws_do_not_depend_on_batch_mates_or_choice_grouping() -> None:
    alone = draw(LOGITS, n=6, seed=5)
    params = SamplingParams(seed=5)
    batch = [Chunk(seq=i, tokens=[1], start=9, pages=[], sample=2, first_choice=2 * i, params=params) for i in range(3)]
    together = sample(batch, LOGITS.repeat(3, 1), ())
    assert [token for answer in together for token in answer.tokens] == alone
    assert draw(LOGITS, n=6, seed=5, start=10) != alone


def test_equal_logits_go_to_the_lowest_id() -> None:
    assert draw(torch.tensor([1.0, 3.0, 3.0, 2.0]), temperature=0.0) == [1]
    assert draw(torch.tensor([1.0, 3.0, 3.0, 2.0]), temperature=0.0, logit_bias={3: 1.0}) == [1]
    assert draw(torch.tensor([1.0, 3.0, 3.0, 2.0]), top_k=1) == [1]


def test_penalties() -> None:
    logits = torch.tensor([2.0, 1.9, -1.0, 1.0])
    assert draw(logits, temperature=0.0, history=[0, 3], prompt=2, repetition_penalty=1.2) == [1]
    assert draw(logits, temperature=0.0, history=[0, 3], prompt=2, presence_penalty=1.0) == [0]
    assert draw(logits, temperature=0.0, history=[3, 0], prompt=1, presence_penalty=0.2) == [1]
    assert draw(logits, temperature=0.0, history=[3, 0, 0], prompt=1, frequency_penalty=0.06) == [1]
    assert draw(logits, temperature=0.0, history=[3, 0], prompt=1, frequency_penalty=0.06) == [0]


def test_end_tokens_are_impossible_before_min_tokens() -> None:
    logits = torch.tensor([5.0, 1.0, 4.0])
    wanted = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (2,)}
    assert draw(logits, start=9, prompt=10, **wanted) == [1]
    assert draw(logits, start=12, prompt=10, **wanted) == [0]


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias={0: 100.0})
    answer = sample([Chunk(seq=0, tokens=[1], start=0, pages=[], sample=1, params=params)], LOGITS[None].clone(), ())[0]
    assert answer.tokens == [0]
    assert answer.logprobs is not None
    assert answer.logprobs[0].logprob == pytest.approx(math.log(0.05), abs=1e-5)
    assert [token for token, _ in answer.logprobs[0].top] == [1, 2]
