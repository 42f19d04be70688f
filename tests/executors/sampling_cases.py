"""Requests and a slow, obvious sampler to hold the real one against."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from research_engine.engine.contract import ScheduledRequest, TokenLogprobs
from research_engine.engine.request import Request
from research_engine.engine.sampling_params import SamplingParams
from research_engine.executors.philox import uniform
from research_engine.executors.sampler import Sampler


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Tokens and log-probabilities that the sampler draws for these requests, each in a seat of its own."""
    count, vocab_size = logits.shape
    sampler = Sampler(count, vocab_size, logits.device)
    sampler.sit_down(list(enumerate(requests)))
    positions = torch.tensor([request.num_tokens for request in requests], device=logits.device)
    rows = [ScheduledRequest(request, request.num_tokens - 1, 1, True, 0) for request in requests]
    draws = sampler.draws(logits, torch.arange(count, device=logits.device), positions)
    draw = sampler.draw(draws, rows, range(count))
    token_ids = draw.sampled.token_ids.tolist()
    draw.check(token_ids)
    return token_ids, draw.logprobs(token_ids)


def make_request(
    *, prompt: Sequence[int] = (0,), output: Sequence[int] = (), seed: int = 0, stop: Sequence[int] = (), **params
) -> Request:
    """A request that has drawn `output` already; temperature 0 unless given."""
    sampling = SamplingParams(**{"temperature": 0.0, **params})
    request = Request(
        "asked", prompt, sampling, arrival_time=0.0, max_tokens=64, seed=seed, stop_token_ids=frozenset(stop)
    )
    request._tokens.extend(output)
    return request


def kept_tokens(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """Tokens that min_p, top_k and top_p leave, most probable first, smaller ids first on ties."""
    most = max(logits)
    weight = [math.exp((x - most) / params.temperature) for x in logits]
    ranked = sorted((i for i in range(len(logits)) if weight[i] > 0), key=lambda i: (-weight[i], i))
    ranked = [i for i in ranked if weight[i] >= params.min_p]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        total, running, kept = math.fsum(weight[i] for i in ranked), 0.0, []
        for i in ranked:
            kept.append(i)
            running += weight[i]
            if running >= params.top_p * total:
                break
        ranked = kept
    return ranked


def drawn_token(logits: Sequence[float], request: Request) -> int:
    """The token at which the running mass of the kept tokens, in order of ids, exceeds u times the whole."""
    params = request.sampling
    most, kept = max(logits), sorted(kept_tokens(logits, params))
    weight = [math.exp((logits[i] - most) / params.temperature) for i in kept]
    target = float(uniform([request.seed], [request.num_tokens])[0]) * math.fsum(weight)
    running = 0.0
    for token, w in zip(kept, weight, strict=True):
        running += w
        if running > target:
            return token
    return kept[-1]
