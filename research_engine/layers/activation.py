"""Activations of feed-forward layers, by the names that ModelConfig gives them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from research_engine import kernels

_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """``act(x)``, elementwise."""
    return _PLAIN[name](x)


def activate_and_mul(name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``act(x[:, :I]) * x[:, I:]`` of ``x [T, 2I]`` into ``out [T, I]``, which is returned."""
    if name == "silu":
        return kernels.silu_and_mul(x, out=out)
    gate, up = x.chunk(2, dim=-1)
    return torch.mul(_PLAIN[name](gate), up, out=out)
