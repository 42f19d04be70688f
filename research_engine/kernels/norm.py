"""RMSNorm, alone and fused with the residual addition."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import check_dtype, check_last_contiguous, check_rows, refuse
from research_engine.kernels._extension import _C, stream_of, traced


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight_offset + weight)` over the last dimension, sums in float32.

    (Zhang and Sennrich, 1910.07467.)

    Args:
        x: `[T, H]`, rows contiguous at any stride.
        weight: `[H]`, contiguous, of x's dtype.
        eps: added to the mean square.
        weight_offset: added to the weight in float32; 1 in Gemma's norms.
        out: `[T, H]`, may be `x`; made when None.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from x's.
        ValueError: a shape, stride or device that breaks the rules above.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if traced(x):
        torch.ops.research_engine.rms_norm(x, weight, out, eps, weight_offset)
    else:
        _rms_norm(x, weight, out, eps, weight_offset)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> None:
    """`residual += x`, then `x = rms_norm(residual) * (weight_offset + weight)`, both in place.

    Args:
        x: `[T, H]`, rows contiguous at any stride; changed.
        residual: `[T, H]`, likewise; changed. What is normed is the sum as stored, rounded to its dtype.
        weight: `[H]`, contiguous, of x's dtype.
        eps: added to the mean square.
        weight_offset: added to the weight in float32.

    Raises:
        TypeError, ValueError: as `rms_norm`.
    """
    if traced(x):
        torch.ops.research_engine.fused_add_rms_norm(x, residual, weight, eps, weight_offset)
    else:
        _fused_add_rms_norm(x, residual, weight, eps, weight_offset)


def _check(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor, other_name: str) -> None:
    dtype = check_dtype("x", x)
    shape = x.shape
    if len(shape) != 2 or shape[1] == 0:
        refuse("x", x, "the shape has to be [T, H] with H > 0")
    check_last_contiguous("x", x)
    check_rows("weight", weight, dtype, shape[1:], "[H]")
    check_rows(other_name, other, dtype, shape, "x's, [T, H]")


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, weight_offset: float) -> None:
    _check(x, weight, out, "out")
    _C.rms_norm(x, weight, out, eps, weight_offset, stream_of(x))


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> None:
    _check(x, weight, residual, "residual")
    _C.fused_add_rms_norm(x, residual, weight, eps, weight_offset, stream_of(x))


_rms_norm_op = torch.library.custom_op(
    "research_engine::rms_norm",
    _rms_norm,
    mutates_args=("out",),
    schema="(Tensor x, Tensor weight, Tensor(a!) out, float eps, float weight_offset) -> ()",
)
_fused_add_rms_norm_op = torch.library.custom_op(
    "research_engine::fused_add_rms_norm",
    _fused_add_rms_norm,
    mutates_args=("x", "residual"),
    schema="(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps, float weight_offset) -> ()",
)


@_rms_norm_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, weight_offset: float) -> None:
    _check(x, weight, out, "out")


@_fused_add_rms_norm_op.register_fake
def _(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float) -> None:
    _check(x, weight, residual, "residual")
