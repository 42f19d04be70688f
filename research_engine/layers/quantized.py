"""A matrix product with a quantised weight: packed for the kernel at few rows, made floats in pieces for many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from research_engine import kernels
from research_engine.kernels.quantized import GROUP_MULTIPLE, KINDS, columns_of

# Rows up to which the packed weight itself is multiplied. On a CPU in float32 that is the fastest at any number (2048 x
# 2048, one core of an EPYC 9004: 105 ms at 1,024 rows against 2 + 103), in bfloat16 oneDNN's product overtakes it. On a
# GPU every 16 rows read the weight once.
_PACKED_ROWS = {("cpu", torch.float32): 1 << 62, ("cpu", torch.bfloat16): 96}
_PACKED_ROWS_GPU = 64
_PIECE_BYTES = 32 << 20  # of the weight as floats at a time: half of a large GPU's second-level cache


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix ``[N, K]`` as a checkpoint means it, whatever its packing there.

    Args:
        kind: "int4", "int8" or "float8", as `kernels.pack_weight` takes them.
        values: ``[N, K]``, uint8 or float8_e4m3fn.
        scales: floats ``[K / g, N]``.
        zeros: uint8 ``[K / g, N]``, None for half the range (8 or 128).
        offsets: floats ``[K / g, N]`` that are added, None without.
        order: int64 ``[K]``: column j of ``values`` belongs to input ``order[j]``; None for j.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def packable(self) -> bool:
        """Whether the kernels take groups of this size."""
        k, groups = self.values.shape[1], self.scales.shape[0]
        return k % groups == 0 and k // groups % GROUP_MULTIPLE == 0

    def to(self, device: torch.device) -> QuantizedTensor:
        """The same on a device."""

        def moved(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x.to(device)

        return QuantizedTensor(
            self.kind, self.values.to(device), self.scales.to(device), moved(self.zeros), moved(self.offsets),
            moved(self.order),
        )  # fmt: skip

    def with_rows(self, rows: torch.Tensor) -> QuantizedTensor:
        """Rows of the matrix by their numbers, int64."""

        def columns(x: torch.Tensor | None) -> torch.Tensor | None:
            return None if x is None else x[:, rows]

        return replace(
            self, values=self.values[rows], scales=self.scales[:, rows], zeros=columns(self.zeros),
            offsets=columns(self.offsets),
        )  # fmt: skip

    def dequantize(self) -> torch.Tensor:
        """float32 ``[N, K]``: ``scales * (values - zeros) + offsets``, columns in the inputs' order."""
        n, k = self.values.shape
        groups = self.scales.shape[0]

        def by_group(x: torch.Tensor) -> torch.Tensor:
            return x.T.float()[:, :, None]  # [N, G, 1]

        weight = self.values.float().view(n, groups, k // groups)
        if self.kind != "float8":
            weight -= KINDS[self.kind].default_zero if self.zeros is None else by_group(self.zeros)
        weight *= by_group(self.scales)
        if self.offsets is not None:
            weight += by_group(self.offsets)
        weight = weight.view(n, k)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)


class QuantizedProduct:
    """``y = x W^T`` for ``x [T, K]``, the rows of ``W`` those of several quantised matrices, one below the other.

    Matrices of one kind, group size and order of inputs become one weight; each other is a product of its own.
    """

    def __init__(self, parts: Sequence[QuantizedTensor]) -> None:
        self.out_features = sum(part.values.shape[0] for part in parts)
        runs: list[list[QuantizedTensor]] = []
        for part in parts:
            if runs and _alike(runs[-1][-1], part):
                runs[-1].append(part)
            else:
                runs.append([part])
        self._weights = [(_packed(run), run[0].order) for run in runs]
        self._workspace = _shared_workspace([weight for weight, _ in self._weights])
        if self._workspace is not None:  # from here on the weights are constants, which may be read early
            torch.cuda.current_stream(self._workspace.device).synchronize()

    @property
    def num_bytes(self) -> int:
        """Memory that the weights take."""
        return sum(weight.num_bytes for weight, _ in self._weights)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``[T, N]``, with ``bias [N]``, of x's dtype, added."""
        if len(self._weights) == 1:
            return self._product(x, *self._weights[0], bias)
        sizes = [weight.out_features for weight, _ in self._weights]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        products = [self._product(x, *weight, part) for weight, part in zip(self._weights, biases, strict=True)]
        return torch.cat(products, dim=-1)

    def _product(
        self, x: torch.Tensor, weight: kernels.QuantizedWeight, order: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if order is not None:
            x = x[:, order]
        if x.shape[0] <= _PACKED_ROWS.get((x.device.type, x.dtype), _PACKED_ROWS_GPU):
            return kernels.quantized_matmul(x, weight, bias, workspace=self._workspace, overlap=True)
        columns = max(1, _PIECE_BYTES // (weight.in_features * x.element_size()) // 128) * 128
        if columns >= weight.out_features:
            return F.linear(x, kernels.dequantize_weight(weight, x.dtype), bias)
        out = x.new_empty(x.shape[0], weight.out_features)
        for first in range(0, weight.out_features, columns):
            last = min(first + columns, weight.out_features)
            piece = kernels.dequantize_weight(columns_of(weight, first, last), x.dtype)
            out[:, first:last] = F.linear(x, piece, None if bias is None else bias[first:last])
        return out


_workspaces: dict[torch.device, torch.Tensor] = {}


def _shared_workspace(weights: Sequence[kernels.QuantizedWeight]) -> torch.Tensor | None:
    """The memory that the packed products of a device share, None on a CPU: they follow each other in one stream.

    It stays where it is, as graphs need it to, and is zeroed once: made in a graph, each replay would zero megabytes
    for every layer. When a larger one is made, products that have the smaller one keep it.
    """
    device = weights[0].weight.device
    size = max(kernels.quantized_matmul_workspace(weight, _PACKED_ROWS_GPU) for weight in weights)
    if size == 0:
        return None
    kept = _workspaces.get(device)
    if kept is None or kept.numel() < size:
        kept = _workspaces[device] = torch.zeros(size, dtype=torch.float32, device=device)
    return kept


def _alike(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether two matrices can be one weight."""
    if a.kind != b.kind or a.scales.shape[0] != b.scales.shape[0] or (a.offsets is None) != (b.offsets is None):
        return False
    return a.order is b.order or (a.order is not None and b.order is not None and torch.equal(a.order, b.order))


def _packed(parts: Sequence[QuantizedTensor]) -> kernels.QuantizedWeight:
    """The matrices below each other, in the layout of their device."""
    kind = parts[0].kind
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts], dim=1)
    offsets = [part.offsets for part in parts if part.offsets is not None]
    dtypes = {part.scales.dtype for part in parts}
    scales = [part.scales if len(dtypes) == 1 else part.scales.float() for part in parts]
    values = [part.values.view(torch.uint8) for part in parts]  # torch concatenates no float8 everywhere
    return kernels.pack_weight(
        torch.cat(values).view(parts[0].values.dtype),
        torch.cat(scales, dim=1),
        zeros,
        torch.cat(offsets, dim=1).to(scales[0].dtype) if offsets else None,
        kind=kind,
    )


def _zeros(part: QuantizedTensor) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros
    shape = part.scales.shape
    return torch.full(shape, KINDS[part.kind].default_zero, dtype=torch.uint8, device=part.scales.device)
