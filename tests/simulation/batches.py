"""Batches made by hand, for cost models."""

from __future__ import annotations

from research_engine.engine.contract import Batch, Request, ScheduledRequest
from research_engine.engine.sampling_params import SamplingParams


def batch_of(*rows: tuple[int, int], draws: bool = True) -> Batch:
    """A batch of (tokens, tokens computed before) rows."""
    made = []
    for index, (tokens, before) in enumerate(rows):
        request = Request(str(index), [0] * (before + tokens), SamplingParams(), arrival_time=0.0, max_tokens=1)
        made.append(ScheduledRequest(request, before, tokens, draws, 0))
    return Batch(0, made, sum(tokens for tokens, _ in rows))


def decodes(count: int, context: int) -> Batch:
    """`count` rows of one token that each read `context` tokens, the new one included."""
    return batch_of(*[(1, context - 1)] * count)
