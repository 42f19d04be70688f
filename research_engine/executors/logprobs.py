"""Log-probabilities of chosen tokens, their ranks, and the most probable tokens beside them.

They are those of the model's own distribution: softmax of the logits before bias, penalties, temperature or truncation.
Tokens are ordered by (probability, then smaller id first), so that ranks and lists are the same on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from research_engine.engine.contract import ScheduledRequest, TokenLogprobs

_PROMPT_LOGITS_AT_ONCE = 128  # rows of [V] float32 logits held at a time


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry a row.

    Args:
        logits: float32 [S, V], finite or -inf.
        token_ids: the token of interest in each row.
        num_top: how many most probable tokens to name in each row; more than V means all V.
    """
    vocab_size = logits.shape[-1]
    chosen = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device).unsqueeze(-1)
    value = logits.gather(-1, chosen)
    ids = torch.arange(vocab_size, device=logits.device)
    ahead = (logits > value) | ((logits == value) & (ids < chosen))
    norm = logits.double().logsumexp(-1)
    logprob = (value.squeeze(-1).double() - norm).tolist()
    rank = (ahead.sum(-1) + 1).tolist()
    width = min(max(num_top, default=0), vocab_size)
    top = _most_probable(logits, norm, width) if width else [[] for _ in token_ids]
    return [
        TokenLogprobs(token_id, logprob[row], rank[row], tuple(top[row][: num_top[row]]))
        for row, token_id in enumerate(token_ids)
    ]


def _most_probable(logits: torch.Tensor, norm: torch.Tensor, width: int) -> list[list[tuple[int, float]]]:
    """(id, logprob) of the `width` most probable tokens of each row, in order."""
    values, indices = logits.topk(width, dim=-1)
    last = values[:, -1:]
    tied = ((logits >= last).sum(-1) > width).tolist()  # topk picks any of those that tie for the last place
    value_rows, index_rows, norms = values.double().tolist(), indices.tolist(), norm.tolist()
    top = []
    for row, ties in enumerate(tied):
        pairs = list(zip(value_rows[row], index_rows[row], strict=True))
        if ties:
            least = value_rows[row][-1]
            pairs = [pair for pair in pairs if pair[0] > least]
            equal = (logits[row] == last[row]).nonzero().squeeze(-1)[: width - len(pairs)].tolist()
            pairs += [(least, index) for index in equal]
        pairs.sort(key=lambda pair: (-pair[0], pair[1]))
        top.append([(index, value - norms[row]) for value, index in pairs])
    return top


def prompt_logprobs(
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    rows: Sequence[ScheduledRequest],
    hidden_TH: torch.Tensor,
) -> Mapping[int, Sequence[TokenLogprobs]]:
    """For the rows whose requests ask: entries of prompt tokens start + 1 ..., as far as the row's logits predict such.

    Args:
        compute_logits: hidden states [S, H] -> [S, V].
        rows: of a batch.
        hidden_TH: of all its tokens, [T, H].
    """
    entries: dict[int, list[TokenLogprobs]] = {}
    end = 0
    for index, row in enumerate(rows):
        end += row.num_tokens
        wanted = row.request.sampling.prompt_logprobs
        if wanted is None:
            continue
        last = min(row.start + row.num_tokens, row.request.num_prompt_tokens - 1)
        targets = row.request.token_ids[row.start + 1 : last + 1]
        first_row = end - row.num_tokens
        entries[index] = []
        for at in range(0, len(targets), _PROMPT_LOGITS_AT_ONCE):
            piece = targets[at : at + _PROMPT_LOGITS_AT_ONCE]
            logits = compute_logits(hidden_TH[first_row + at : first_row + at + len(piece)]).float()
            entries[index] += token_logprobs(logits, piece, [wanted] * len(piece))
    return entries
