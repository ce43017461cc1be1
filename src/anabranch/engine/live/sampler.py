"""Choose next tokens from logits, as `SamplingParams` says.

Logprobs follow OpenAI: of the model's own distribution, before bias, penalties, temperature and truncation.
Randomness is counter-based: one uniform number per (seed, choice, position), cut from BLAKE3 of the three. It does
not depend on batch mates, chunking, preemption or the process that draws. Equal logits rank by token id, lowest first.
"""

from __future__ import annotations

import torch
from blake3 import blake3

from anabranch.engine.request import SamplingParams, TokenLogprob
from anabranch.engine.runner import Chunk, Sampled

Tensor = torch.Tensor
_FIRST_TRY = 256


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), with 53 random bits."""
    name = b"".join((value % (1 << 64)).to_bytes(8, "little") for value in (seed, choice, position))
    return (int.from_bytes(blake3(name).digest(8), "little") >> 11) * 2.0**-53


def sample(batch: list[Chunk], logits: Tensor, eos: tuple[int, ...]) -> list[Sampled]:
    """One answer per row of `logits` [n, vocab] float32, which it may change. `batch`: the n chunks that sample."""
    answers: dict[int, Sampled] = {}
    plain = [row for row, chunk in enumerate(batch) if _is_plain(chunk)]
    if plain:
        best = (logits if len(plain) == len(batch) else logits[plain]).argmax(dim=-1).tolist()
        for row, token in zip(plain, best, strict=True):
            answers[row] = Sampled(batch[row].seq, [token] * batch[row].sample)
    for row, chunk in enumerate(batch):
        if row not in answers:
            answers[row] = _sample_row(chunk, logits[row], eos)
    return [answers[row] for row in range(len(batch))]


def _is_plain(chunk: Chunk) -> bool:
    """Greedy, and nothing that changes or reports the logits."""
    p = chunk.params
    return p is None or (
        p.temperature <= 0
        and p.logprobs is None
        and not p.logit_bias
        and not p.min_tokens
        and p.repetition_penalty == 1.0
        and p.presence_penalty == 0.0
        and p.frequency_penalty == 0.0
    )


def _sample_row(chunk: Chunk, logits: Tensor, eos: tuple[int, ...]) -> Sampled:
    params = chunk.params or SamplingParams(temperature=0.0)
    position = chunk.start + len(chunk.tokens)
    logprobs = torch.log_softmax(logits, dim=-1) if params.logprobs is not None else None
    scores = _adjusted(chunk, params, logits.clone(), eos)
    if params.temperature <= 0:
        tokens = [int(scores.argmax())] * chunk.sample
    else:
        choices = range(chunk.first_choice, chunk.first_choice + chunk.sample)
        tokens = _draw(scores, params, [uniform(params.seed, choice, position) for choice in choices])
    if logprobs is None:
        return Sampled(chunk.seq, tokens)
    return Sampled(chunk.seq, tokens, _report(logprobs, tokens, params.logprobs or 0))


def _adjusted(chunk: Chunk, params: SamplingParams, scores: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Logit bias, then penalties; end tokens are impossible before `min_tokens`."""
    vocab = len(scores)
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab}
    if bias:
        scores[list(bias)] += torch.tensor(list(bias.values()), dtype=scores.dtype)
    if chunk.history is not None:
        _penalize(scores, chunk.history, chunk.prompt_tokens, params)
    generated = chunk.start + len(chunk.tokens) - chunk.prompt_tokens
    if chunk.prompt_tokens and generated < params.min_tokens:
        ends = [token for token in {*eos, *params.stop_token_ids} if 0 <= token < vocab]
        scores[ends] = -torch.inf
    return scores


def _penalize(scores: Tensor, history: list[int], prompt_tokens: int, params: SamplingParams) -> None:
    """Repetition as in CTRL (Keskar et al. 2019, §4.1), over prompt and answer; the others as OpenAI, answer only."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(history)))
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    generated = history[prompt_tokens:]
    if generated and (params.presence_penalty or params.frequency_penalty):
        used, counts = torch.unique(torch.tensor(generated), return_counts=True)
        scores[used] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(scores: Tensor, params: SamplingParams, uniforms: list[float]) -> list[int]:
    """Temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution at each uniform number."""
    weights = torch.softmax(scores.double() / params.temperature, dim=-1)
    if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        ids, weights = _truncated(weights, params)
    else:
        ids = torch.arange(len(weights))
    cumulative = weights.cumsum(dim=-1)
    targets = torch.tensor(uniforms, dtype=torch.float64) * cumulative[-1]
    at = torch.searchsorted(cumulative, targets, right=True).clamp_(max=len(ids) - 1)
    return [int(token) for token in ids[at]]


def _truncated(weights: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The surviving ids in descending weight and their weights, never empty."""
    total = len(weights)
    keep = min(params.top_k, total) if params.top_k > 0 else total
    ids, ranked = _largest(weights, keep, params)
    if params.top_k > 0:
        ranked = ranked / ranked.sum()
    if params.top_p < 1.0:
        before = ranked.cumsum(dim=-1) - ranked
        count = max(1, int((before < params.top_p).sum()))
        ids, ranked = ids[:count], ranked[:count]
    if params.min_p > 0.0:
        count = max(1, int((ranked >= params.min_p * ranked[0]).sum()))
        ids, ranked = ids[:count], ranked[:count]
    return ids, ranked


def _largest(weights: Tensor, keep: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """The `keep` largest, in order, ties by id; fewer where top-p or min-p is sure to cut the rest."""
    few = min(keep, _FIRST_TRY) if params.top_k > 0 else min(_FIRST_TRY, len(weights))
    floor = torch.topk(weights, few).values[-1]
    candidates = torch.nonzero(weights >= floor).flatten()
    values, order = torch.sort(weights[candidates], descending=True, stable=True)
    enough = few == keep
    enough |= params.top_k <= 0 and params.top_p < 1.0 and float(values.sum()) >= params.top_p
    enough |= params.min_p > 0.0 and float(floor) < params.min_p * float(values[0])
    if not enough:
        values, candidates = torch.sort(weights, descending=True, stable=True)
        return candidates[:keep], values[:keep]
    return candidates[order][:keep], values[:keep]


def _report(logprobs: Tensor, tokens: list[int], count: int) -> list[TokenLogprob]:
    top: list[tuple[int, float]] = []
    if count:
        values, ids = torch.topk(logprobs, min(count, len(logprobs)))
        top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return [TokenLogprob(float(logprobs[token]), top) for token in tokens]
