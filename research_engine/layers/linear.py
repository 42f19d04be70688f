"""A matrix product with a weight that never changes: packed once for the CPU's oneDNN kernels, as it is on a GPU.

float32, 2 cores of an AMD EPYC (Zen 4), SmolLM2-135M's shapes, microseconds of F.linear -> packed:
    weight          16 rows          512 rows
    [960, 576]      358 -> 136       3403 -> 2810
    [576, 576]      225 -> 119       2189 -> 1874
    [3072, 576]     1102 -> 385      14093 -> 9034
    [576, 1536]     440 -> 198       5100 -> 4318
    [49152, 576]    19849 -> 6031    -
The kernel that serves F.linear reorders the weight in every call, which at few rows costs more than the product.

On a GPU up to 16 rows of 16-bit floats, a decode step's, take `kernels.skinny_gemm`, and on Hopper up to 32, 48 or 64,
depending on the weight's shape, where that is the faster one; more take the library's product.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from research_engine import kernels
from research_engine.kernels.gemm import CUDA_DTYPES, DEPTH_MULTIPLE
from research_engine.layers.activation import activate_and_mul
from research_engine.layers.invariant import in_tiles
from research_engine.layers.quantized import QuantizedProduct

_PACKING_ROWS = 512  # the layout oneDNN picks for so many rows is also the fastest one measured at 1 to 128


class Linear:
    """``y = x W^T + b`` for ``x [T, K]``, ``W [N, K]``; y has x's dtype.

    ``weight`` (and ``bias [N]``) are filled in place by the loader; ``pack()`` then moves the weight to the fastest
    layout for its device, after which ``weight`` is None. Instead of filling it, ``quantize()`` puts a quantised weight
    in its place; one that was made on the meta device and is to be filled after all needs ``materialize()`` before.

    Attributes:
        rows_at_once: compute so many rows in every product, so that no row depends on how many there are; None for all.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight: torch.Tensor | None = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None
        self._quantized: QuantizedProduct | None = None
        self.rows_at_once: int | None = None
        self._skinny_rows = 0  # up to so many rows the hand-written product is taken

    def quantize(self, product: QuantizedProduct) -> None:
        """Mutates: the weight is given up for a quantised one."""
        self._quantized, self.weight = product, None

    def materialize(self, device: torch.device) -> None:
        """Mutates: memory for the weight, contents undefined."""
        assert self.weight is not None
        self.weight = torch.empty_like(self.weight, device=device)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Views for the loader: ``{"weight": ...}`` and, with one, ``"bias"``. Valid until ``pack()``."""
        assert self.weight is not None
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def pack(self) -> None:
        """Mutates: the weight changes its layout, where plain weights are not the fastest there is, and is fixed."""
        if self.weight is None:
            return
        if _packable(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKING_ROWS)
            self.weight = None
        else:
            self._skinny_rows = _skinny_rows(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x) if self.rows_at_once is None else in_tiles(self._product, x, self.rows_at_once)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        if self._quantized is not None:
            return self._quantized(x, self.bias)
        assert self.weight is not None
        if 0 < x.shape[0] <= self._skinny_rows:
            return kernels.skinny_gemm(x, self.weight, self.bias, overlap=True)
        return F.linear(x, self.weight, self.bias)


def _skinny_rows(weight: torch.Tensor, gated: bool = False) -> int:
    """Up to so many rows the hand-written kernel takes this weight, and should."""
    if weight.is_cuda and weight.dtype in CUDA_DTYPES and weight.shape[1] % DEPTH_MULTIPLE == 0:
        return kernels.skinny_gemm_rows(weight, gated=gated)
    return 0


def _packable(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class QKVLinear(Linear):
    """Query, key and value projections as one product; rows of the weight lie in that order."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, q_size: int, kv_size: int) -> None:
        super().__init__(weight, bias)
        self.sizes = (q_size, kv_size, kv_size)

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for the loader: ``{"q": {"weight": ..., "bias": ...}, "k": ..., "v": ...}``. Valid until ``pack()``."""
        return _parts(self, ("q", "k", "v"), self.sizes)


class GateUpLinear(Linear):
    """Gate and up projections of the MLP as one product, gate first, as ``silu_and_mul`` wants them."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._gated_rows = 0  # as `_skinny_rows`, with the activation

    def pack(self) -> None:
        super().pack()
        if self.weight is not None:
            self._gated_rows = _skinny_rows(self.weight, gated=True)

    def parts(self) -> dict[str, dict[str, torch.Tensor]]:
        """Views for the loader: ``{"gate": {"weight": ...}, "up": ...}``. Valid until ``pack()``."""
        assert self.weight is not None
        half = self.weight.shape[0] // 2
        return _parts(self, ("gate", "up"), (half, half))

    def gated(self, activation: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """``act(gate(x)) * up(x)`` of ``x [T, K]`` into ``out [T, I]``, which is returned."""
        if activation == "silu" and 0 < x.shape[0] <= self._gated_rows and self.rows_at_once is None:
            assert self.weight is not None
            return kernels.skinny_gemm(x, self.weight, self.bias, gated=True, out=out, overlap=True)
        return activate_and_mul(activation, self(x), out)


def _parts(layer: Linear, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, dict[str, torch.Tensor]]:
    assert layer.weight is not None
    parts = {name: {"weight": w} for name, w in zip(names, layer.weight.split(sizes), strict=True)}
    if layer.bias is not None:
        for name, b in zip(names, layer.bias.split(sizes), strict=True):
            parts[name]["bias"] = b
    return parts
