"""What every weights format offers the loader: names with shapes up front, then tensors one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch


class Checkpoint(Protocol):
    """Weights under Hugging Face's names, whatever the file calls them."""

    @property
    def location(self) -> str:
        """Where the weights lie, for error messages."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor of the checkpoint; reads no weights."""
        ...

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor of any float dtype, dequantised, of the shape given by ``shapes()``.

        Raises:
            LoadError: the bytes cannot be read or make no sense.
        """
        ...
