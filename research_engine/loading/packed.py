"""Puts quantised matrices of a checkpoint into a model as they are: which of its layers wait for which tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from research_engine.layers.linear import Linear
from research_engine.layers.quantized import QuantizedProduct, QuantizedTensor
from research_engine.models.decoder import Decoder


@runtime_checkable
class QuantizedSource(Protocol):
    """A checkpoint some of whose matrices are quantised."""

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is a quantised matrix."""
        ...

    def quantized(self, name: str, device: torch.device) -> QuantizedTensor | None:
        """A quantised matrix, None for a tensor of floats."""
        ...


class PendingMatrix:
    """A linear layer whose weight is read part by part (query, key, value), and packed when the last one is there."""

    def __init__(
        self, linear: Linear, checkpoint: QuantizedSource, stored: tuple[str, ...], device: torch.device
    ) -> None:
        self._linear, self._checkpoint, self._stored, self._device = linear, checkpoint, stored, device
        self._parts: dict[str, QuantizedTensor] = {}

    def read(self, stored: str) -> None:
        """Mutates: one part; with the last one, the layer. Groups that no kernel takes become floats.

        Raises:
            LoadError: the tensors make no sense.
        """
        part = self._checkpoint.quantized(stored, self._device)
        assert part is not None
        self._parts[stored] = part
        if len(self._parts) < len(self._stored):
            return
        parts = [self._parts[name] for name in self._stored]
        if all(part.packable for part in parts):
            self._linear.quantize(QuantizedProduct(parts))
        else:
            self._linear.materialize(self._device)
            assert self._linear.weight is not None
            rows = self._linear.weight.split([part.values.shape[0] for part in parts])
            for view, part in zip(rows, parts, strict=True):
                view.copy_(part.dequantize())
        self._parts.clear()


def defer_matrices(model: Decoder, checkpoint: QuantizedSource, wanted: Mapping[str, str]) -> dict[str, PendingMatrix]:
    """Sort out the matrices of a model made with ``defer_matrices``. Mutates: those that are floats get their memory.

    Args:
        wanted: stored name -> the model's name, as `matching.Match.wanted`.

    Returns:
        Stored name of a quantised matrix -> the layer that waits for it.
    """
    stored_as = {name: stored for stored, name in wanted.items()}
    pending: dict[str, PendingMatrix] = {}
    for linear, names in model.matrices():
        stored = tuple(stored_as[name] for name in names)
        if all(checkpoint.is_quantized(name) for name in stored):
            pending |= dict.fromkeys(stored, PendingMatrix(linear, checkpoint, stored, model.device))
        else:
            linear.materialize(model.device)
    return pending
