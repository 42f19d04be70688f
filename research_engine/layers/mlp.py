"""Dense feed-forward layers: gated, with gate and up projection as one product, and plain."""

from __future__ import annotations

import torch

from research_engine.layers.activation import activate
from research_engine.layers.linear import GateUpLinear, Linear


class GatedMLP:
    """``down(act(gate(x)) * up(x))`` (Shazeer 2020)."""

    def __init__(self, gate_up: GateUpLinear, down: Linear, activation: str) -> None:
        self.gate_up, self.down, self.activation = gate_up, down, activation

    def __call__(self, x: torch.Tensor, gated_TI: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``. Mutates ``gated_TI``, memory that all layers share."""
        return self.down(self.gate_up.gated(self.activation, x, gated_TI))

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for the loader; gate and up as one and apart."""
        return {"gate_up": self.gate_up.parameters(), **self.gate_up.parts(), "down": self.down.parameters()}

    def matrices(self) -> list[tuple[Linear, tuple[str, ...], int | None]]:
        """Linear layers with the parts that their rows are, in order, and the expert's number, if it is one's."""
        return [(self.gate_up, ("gate", "up"), None), (self.down, ("down",), None)]

    def linears(self) -> list[Linear]:
        """What ``pack()`` is to be called on."""
        return [self.gate_up, self.down]


class PlainMLP:
    """``down(act(up(x)))``."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up, self.down, self.activation = up, down, activation

    def __call__(self, x: torch.Tensor, gated_TI: torch.Tensor) -> torch.Tensor:
        """``[T, H] -> [T, H]``. The memory for gated products stays unused."""
        return self.down(activate(self.activation, self.up(x)))

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for the loader."""
        return {"up": self.up.parameters(), "down": self.down.parameters()}

    def matrices(self) -> list[tuple[Linear, tuple[str, ...], int | None]]:
        """Linear layers with the parts that their rows are, in order, and the expert's number, if it is one's."""
        return [(self.up, ("up",), None), (self.down, ("down",), None)]

    def linears(self) -> list[Linear]:
        """What ``pack()`` is to be called on."""
        return [self.up, self.down]
