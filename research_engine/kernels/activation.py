"""The gated activation of Llama's feed-forward layer."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import check_dtype, check_last_contiguous, check_rows, refuse
from research_engine.kernels._extension import _C, stream_of, traced


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(x[:, :I]) * x[:, I:]` with `silu(a) = a / (1 + exp(-a))` (SwiGLU: Shazeer, 2002.05202).

    Args:
        x: `[T, 2I]`, rows contiguous at any stride.
        out: `[T, I]`, likewise, of x's dtype; made when None.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from x's.
        ValueError: a shape, stride or device that breaks the rules above.
    """
    if out is None:
        if x.dim() != 2:
            refuse("x", x, "the shape has to be [T, 2I]")
        out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype, device=x.device)
    if traced(x):
        torch.ops.research_engine.silu_and_mul(x, out)
    else:
        _silu_and_mul(x, out)
    return out


def _check(x: torch.Tensor, out: torch.Tensor) -> None:
    dtype = check_dtype("x", x)
    shape = x.shape
    if len(shape) != 2 or shape[1] % 2 or shape[1] == 0:
        refuse("x", x, "the shape has to be [T, 2I] with I > 0")
    check_last_contiguous("x", x)
    check_rows("out", out, dtype, (shape[0], shape[1] // 2), "[T, I]")


def _silu_and_mul(x: torch.Tensor, out: torch.Tensor) -> None:
    _check(x, out)
    _C.silu_and_mul(x, out, stream_of(x))


_silu_and_mul_op = torch.library.custom_op(
    "research_engine::silu_and_mul",
    _silu_and_mul,
    mutates_args=("out",),
    schema="(Tensor x, Tensor(a!) out) -> ()",
)
_silu_and_mul_op.register_fake(_check)
