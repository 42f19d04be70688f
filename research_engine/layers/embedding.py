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
    """Logits over the vocabulary: ``[S, H] -> float32 [S, V]``. Called on the rows that sample, not on all of them."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self._skinny_dtype = torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x).float()
