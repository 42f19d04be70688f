"""Token embedding and the output projection onto the vocabulary, which may share one weight."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from research_engine.layers.linear import Linear


class Embedding:
    """Rows of ``weight [V, H]`` by token id: int64 ``[T]`` -> ``[T, H]``. Ids must lie in ``[0, V)``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


class LMHead(Linear):
    """Logits over the vocabulary: ``[S, H] -> [S, V]``. Called on the rows that sample, not on all of them.

    float32; on a GPU they stay in x's dtype, which the sampling kernel widens on the way in: the same numbers, and 256
    rows of 128,000 need no 131 MB written and read again.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().__call__(x)
        return logits if x.is_cuda else logits.float()
