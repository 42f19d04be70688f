"""Norms of hidden states, alone and after a residual addition."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from research_engine import kernels


class Norm(Protocol):
    """Rows ``[T, H]`` to normed rows of the same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Mutates: ``residual += x``. Returns the norm of the sum, which may lie in x's memory."""
        ...

    def parameters(self) -> dict[str, torch.Tensor]:
        """Views for the loader, by their names in the module."""
        ...


class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * (offset + weight)`` (Zhang and Sennrich 2019); an offset of 1 in Gemma."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        self.weight, self.eps, self.offset = weight, eps, offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, weight_offset=self.offset)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Mutates both: ``residual += x``, and x becomes the norm of the sum, which is returned."""
        kernels.fused_add_rms_norm(x, residual, self.weight, self.eps, weight_offset=self.offset)
        return x

    def parameters(self) -> dict[str, torch.Tensor]:
        """``{"weight": [H]}``."""
        return {"weight": self.weight}


class LayerNorm:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (Ba et al. 2016)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Mutates: ``residual += x``. Returns the norm of the sum."""
        return self(residual.add_(x))

    def parameters(self) -> dict[str, torch.Tensor]:
        """``{"weight": [H], "bias": [H]}``."""
        return {"weight": self.weight, "bias": self.bias}


class NoNorm:
    """Stands where a family has no norm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Mutates and returns: ``residual += x``."""
        return residual.add_(x)

    def parameters(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}
