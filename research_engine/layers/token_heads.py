"""BGE-M3's two heads beside the dense vector (Chen et al., 2402.03216): a weight and a vector for every token."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from research_engine.layers.pooling import normalized


class TokenHeads:
    """Reads hidden states ``[T, H]``.

    Args:
        sparse_weight, sparse_bias: ``[1, H]`` and ``[1]``.
        vector_weight, vector_bias: ``[M, H]`` and ``[M]``.
    """

    def __init__(
        self,
        sparse_weight: torch.Tensor,
        sparse_bias: torch.Tensor,
        vector_weight: torch.Tensor,
        vector_bias: torch.Tensor,
    ) -> None:
        self.sparse_weight, self.sparse_bias = sparse_weight, sparse_bias
        self.vector_weight, self.vector_bias = vector_weight, vector_bias

    def lexical(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """How much each token counts in lexical matching: ``relu(w . h + b)``, float32 ``[T]``."""
        return F.linear(hidden_TH, self.sparse_weight, self.sparse_bias).relu().flatten().float()

    def multi_vector(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """A vector of length 1 for each token, for late interaction as in ColBERT: float32 ``[T, M]``."""
        return normalized(F.linear(hidden_TH, self.vector_weight, self.vector_bias).float())
