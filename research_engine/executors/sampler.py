"""Draws one token a row from logits, each row by its own request's parameters, independent of the rows around it.

Order of the steps:
  1. logit_bias added; repetition penalty (prompt and output), then presence and frequency penalties (output alone);
     tokens that the request's constraint does not allow masked; stop tokens masked while the output is shorter than
     min_tokens, unless the constraint allows nothing else;
  2. temperature 0: the largest logit, the smallest id on ties;
  3. otherwise weights w = exp((x - max x) / temperature) in float64; kept are the first m tokens by (weight, smaller id
     first), m the least that min_p, then top_k, then top_p of the mass that is left allow, never less than 1;
  4. the token at which the running sum of kept weights, in the order of ids, first exceeds u times their total, with
     u = Philox(seed, position) (philox.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from research_engine.engine.contract import Request, TokenLogprobs
from research_engine.executors.logprobs import token_logprobs
from research_engine.executors.philox import uniform

_ROWS_AT_ONCE = 64  # bounds the float64 copies of drawn rows: 64 x V x 8 bytes each
_FIRST_LOOK = 512  # tokens to sort for top_p before all of the vocabulary is


@dataclass(frozen=True)
class SampledTokens:
    """Drawn tokens, one a row, and log-probabilities by row where the request asked for them."""

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> SampledTokens:
    """Draw the next token of every request.

    Args:
        logits: float32 [S, V]; overwritten.
        requests: one a row; not changed. The draw's position is the number of tokens it has.

    Raises:
        ValueError: a row's logits hold NaN or +inf, or no token is left; the message names the request.
    """
    params = [request.sampling for request in requests]
    asking = [row for row, p in enumerate(params) if p.logprobs is not None]
    if asking or any(_changes_logits(request) for request in requests) or any(not p.is_greedy for p in params):
        _check(logits, requests, logits.amax(-1))
        original = logits[asking] if asking else None  # a copy
        for row, request in enumerate(requests):
            if _changes_logits(request):
                _change_logits(logits[row], request)
        token_ids = _argmax(logits, requests)
        drawn = [row for row, p in enumerate(params) if not p.is_greedy]
        for at in range(0, len(drawn), _ROWS_AT_ONCE):
            rows = drawn[at : at + _ROWS_AT_ONCE]
            for row, token_id in zip(rows, _draw(logits[rows], [requests[row] for row in rows]), strict=True):
                token_ids[row] = token_id
        if original is None:
            return SampledTokens(token_ids)
        entries = token_logprobs(
            original, [token_ids[row] for row in asking], [params[row].logprobs or 0 for row in asking]
        )
        return SampledTokens(token_ids, dict(zip(asking, entries, strict=True)))
    return SampledTokens(_argmax(logits, requests))


def _argmax(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Largest logit a row, smallest id on ties."""
    if logits.device.type == "cpu":  # numpy's is vectorised: some 10 times as fast as torch's
        array = logits.numpy()
        token_ids = array.argmax(-1)
        largest = torch.from_numpy(array[np.arange(len(requests)), token_ids])
        chosen: list[int] = token_ids.tolist()
    else:
        largest, indices = logits.max(-1)
        chosen = indices.tolist()
    _check(logits, requests, largest)
    return chosen


def _check(logits: torch.Tensor, requests: Sequence[Request], largest: torch.Tensor) -> None:
    """Every row has a largest logit that is a number: a NaN anywhere in a row is the row's maximum."""
    if bool(largest.isfinite().all()):
        return
    row = int((~largest.isfinite()).nonzero()[0, 0])
    request, value = requests[row], float(largest[row])
    if value == -torch.inf:
        raise ValueError(f"request {request.id!r}: no token is left to draw, all {logits.shape[-1]} logits are -inf")
    what = "NaN" if value != value else "inf"
    raise ValueError(f"request {request.id!r}: the model's logits at position {request.num_tokens} hold {what}")


def _changes_logits(request: Request) -> bool:
    params = request.sampling
    if request.constraint is not None or params.logit_bias or params.needs_penalties:
        return True
    return request.num_output_tokens < params.min_tokens


def _change_logits(row: torch.Tensor, request: Request) -> None:
    """Mutates one row of logits [V]: bias, penalties, the constraint, stop tokens before min_tokens."""
    params, device = request.sampling, row.device
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        row[ids] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=device)
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(np.array(request.token_ids, dtype=np.int64))).to(device)
        values = row[seen]
        values = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[seen] = values.nan_to_num_()  # an extreme penalty leaves float32's range, which is no reason to fail
    if (params.presence_penalty or params.frequency_penalty) and request.num_output_tokens:
        output = np.array(request.output_token_ids, dtype=np.int64)
        tokens, counts = np.unique(output, return_counts=True)
        loss = params.presence_penalty + params.frequency_penalty * counts
        row[torch.from_numpy(tokens).to(device)] -= torch.from_numpy(loss).to(device, row.dtype)
    if request.constraint is not None:
        bits = np.unpackbits(np.frombuffer(request.constraint.allowed(), dtype=np.uint8), bitorder="little")
        row.masked_fill_(torch.from_numpy(bits[: len(row)] == 0).to(device), -torch.inf)
    if request.num_output_tokens < params.min_tokens and request.stop_token_ids:
        stops = torch.tensor(sorted(request.stop_token_ids), dtype=torch.int64, device=device)
        rest = row.index_fill(0, stops, -torch.inf)
        if request.constraint is None or bool(rest.isfinite().any()):
            row.copy_(rest)


def _draw(logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """Draw from rows of positive temperature: float32 [S, V] with a finite maximum each."""
    params, device, vocab_size = [request.sampling for request in requests], logits.device, logits.shape[-1]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    x = logits.double()
    weights = x.sub_(x.amax(-1, keepdim=True)).div_(temperature.unsqueeze(-1)).exp_()
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    cut = [row for row, p in enumerate(params) if top_k[row] < vocab_size or p.top_p < 1.0 or p.min_p > 0.0]
    if cut:
        few = weights[cut]
        kept = _kept(
            few, [top_k[row] for row in cut], [params[row].top_p for row in cut], [params[row].min_p for row in cut]
        )
        weights[cut] = few.masked_fill_(~kept, 0.0)
    mass = weights.cumsum_(-1)
    total = mass[:, -1]
    u = torch.from_numpy(uniform([r.seed for r in requests], [r.num_tokens for r in requests])).to(device)
    target = torch.minimum(
        u * total, total.nextafter(torch.zeros_like(total))
    )  # below the total, whatever the rounding
    drawn: list[int] = torch.searchsorted(mass, target.unsqueeze(-1), right=True).squeeze(-1).tolist()
    return drawn


def _kept(weights: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float]) -> torch.Tensor:
    """Which tokens stay: bool [S, V]. Weights are float64 [S, V] with a maximum of 1 in every row."""

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.tensor(list(values), dtype=dtype, device=weights.device).unsqueeze(-1)

    vocab_size = weights.shape[-1]
    k, p = column(top_k, torch.int64), column(top_p)
    eligible = (weights >= column(min_p)) & (weights > 0)
    limit = eligible.sum(-1, keepdim=True)
    mass = weights.masked_fill(~eligible, 0.0).sum(-1, keepdim=True)  # of the tokens that min_p leaves
    limit = torch.minimum(limit, k)
    sorted_by = [n for n in top_k if n < vocab_size]
    width = min(vocab_size, max([_FIRST_LOOK, *sorted_by]))
    while True:
        ordered = weights.topk(width, dim=-1).values
        running = ordered.cumsum(-1)
        whole = limit <= width  # the list holds all that min_p and top_k leave
        total = torch.where(whole, running.gather(-1, limit.clamp(max=width) - 1), mass)
        reaching = (running < p * total).sum(-1, keepdim=True) + 1
        count = torch.where(p < 1.0, torch.minimum(limit, reaching), limit)
        if width == vocab_size or bool((whole | (reaching <= width) | (p == 1.0)).all()):
            break
        width = vocab_size
    least = ordered.gather(-1, count.clamp(max=width) - 1)
    above = weights > least
    equal = weights == least
    room = count - above.sum(-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(-1) <= room))
    return torch.where(count > width, eligible, kept)
