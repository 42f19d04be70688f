"""From hidden states of tokens to vectors of texts, over a ragged batch."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def pool(hidden_TH: torch.Tensor, starts: torch.Tensor, kind: str) -> torch.Tensor:
    """One vector a text, float32 ``[R, H]``.

    Args:
        hidden_TH: of any float dtype, texts one after the other.
        starts: int64 ``[R + 1]``, where each text begins, and the end; no text is empty.
        kind: "mean", "cls" (the first token) or "last".
    """
    if kind == "cls":
        return hidden_TH[starts[:-1]].float()
    if kind == "last":
        return hidden_TH[starts[1:] - 1].float()
    # unsafe: without the checks of starts, which would wait for a GPU
    return torch.segment_reduce(hidden_TH.float(), "mean", offsets=starts, axis=0, unsafe=True)


def normalized(vectors: torch.Tensor) -> torch.Tensor:
    """Rows at length 1; a row of zeros stays one."""
    return F.normalize(vectors, dim=-1)
