"""Pseudo-random quantised matrices in the shapes of a model: to measure packed weights without a checkpoint."""

from __future__ import annotations

import torch

from research_engine.layers.quantized import QuantizedTensor
from research_engine.loading.dummy import DummyCheckpoint, hashed_uniform
from research_engine.models.config import ModelConfig
from research_engine.models.decoder import Decoder

_LARGEST_FLOAT8 = 448.0


class DummyQuantizedCheckpoint(DummyCheckpoint):
    """As `DummyCheckpoint`, the layers' matrices of uniform elements in their whole range, variance 1 / fan-in."""

    def __init__(self, name: str, config: ModelConfig, seed: int) -> None:
        super().__init__(name, config, seed)
        assert config.quantization is not None
        self._quantization = config.quantization
        blank = Decoder(config, dtype=torch.float32, device="meta")
        self._matrices = {name for _, names in blank.matrices() for name in names}

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is a quantised matrix."""
        return name in self._matrices

    def quantized(self, name: str, device: torch.device) -> QuantizedTensor | None:
        """A quantised matrix, made on ``device``; None for a tensor of floats."""
        if name not in self._matrices:
            return None
        (n, k), bits = self.shapes()[name], self._quantization.bits
        group_size = self._quantization.group_size
        groups = k // group_size if group_size > 0 else 1
        dtype, variance = torch.float16, (4.0**bits - 1) / 12
        if self._quantization.method == "fp8":
            dtype, variance = torch.float32, _LARGEST_FLOAT8**2 / 3
        scales = torch.full((groups, n), (k * variance) ** -0.5, dtype=dtype, device=device)
        kind = "float8" if self._quantization.method == "fp8" else f"int{bits}"
        codes = torch.empty(n, k, dtype=torch.float8_e4m3fn if kind == "float8" else torch.uint8, device=device)
        for start, uniform in hashed_uniform(n * k, f"{self._seed}:{name}", device):
            values = uniform * (2 * _LARGEST_FLOAT8) - _LARGEST_FLOAT8 if kind == "float8" else uniform * 2.0**bits
            codes.view(-1)[start : start + len(values)] = values.to(codes.dtype)
        return QuantizedTensor(kind, codes, scales)

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor, float32, made on ``device``."""
        matrix = self.quantized(name, device)
        return super().read(name, device) if matrix is None else matrix.dequantize()
