"""The product of few rows with a 16-bit weight, bound by reading the weight: what a decode step's linear layers are."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import check_dtype, check_exactly, check_rows, refuse
from research_engine.kernels._extension import _C, stream_of, traced

MAX_ROWS = 64
DEPTH_MULTIPLE = 8  # of K: 16 bytes
CUDA_DTYPES = (torch.bfloat16, torch.float16)


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    overlap: bool = False,
) -> torch.Tensor:
    """`x W^T + bias` for at most 64 rows of x; sums are float32 and rounded once.

    A row's bits do not depend on the other rows. On their number they depend on a GPU alone: on sm_90 more than 8 or 16
    rows, by the weight's shape, take another kernel, and the one for few rows shares K between thread blocks where one
    does not hold all of x.

    Args:
        x: `[T, K]`, T at most 64, K a multiple of 8, rows contiguous at any stride that is a multiple of 16 bytes.
        weight: `[N, K]`, likewise, of x's dtype: bfloat16 or float16 on CUDA, float32 or bfloat16 on a CPU.
        bias: `[N]`, of x's dtype.
        gated: the result is `silu(y[:, :I]) * y[:, I:]` of the product `y [T, 2I]`, as of `silu_and_mul`.
        out: `[T, N]`, gated `[T, I]`, rows contiguous at any stride, of x's dtype or float32; made when None.
        out_dtype: of the result when `out` is None; x's when None.
        overlap: CUDA (sm_90 on): the kernel may begin to read `weight` before kernels ahead of it in the stream have
            ended, which hides the launch. Only for a weight that none of them writes: a constant. Results are the same.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from x's.
        ValueError: a shape, stride or device that breaks the rules above.
    """
    if out is None:
        if x.dim() != 2 or weight.dim() != 2:
            _check_shapes(x, weight, gated)
        columns = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.empty((x.shape[0], columns), dtype=out_dtype or x.dtype, device=x.device)
    elif out_dtype not in (None, out.dtype):
        raise TypeError(f"out_dtype: {out_dtype}, but out is {out.dtype}; give one of them")
    if traced(x):
        torch.ops.research_engine.skinny_gemm(x, weight, bias, out, gated, overlap)
    else:
        _skinny_gemm(x, weight, bias, out, gated, overlap)
    return out


def skinny_gemm_rows(weight: torch.Tensor, *, gated: bool = False) -> int:
    """Rows of x, at most 64, up to which a layer should multiply this CUDA weight by `skinny_gemm`.

    So many pass in one reading of the weight. Above 16, on sm_90, they are those up to which the op was as fast as a
    library's product on an H200 (`skinny_gemm_wgmma.cu` has the rule); gated there are none. 0: K is too large for the
    device's shared memory, and the op refuses it. The answer depends on the weight's shape and on the device.
    """
    stream_of(weight)
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    return _C.skinny_gemm_rows(columns, weight.shape[1], gated, weight.get_device())


def _check_shapes(x: torch.Tensor, weight: torch.Tensor, gated: bool) -> None:
    if x.dim() != 2 or x.shape[0] > MAX_ROWS or x.shape[1] == 0 or x.shape[1] % DEPTH_MULTIPLE:
        refuse("x", x, f"the shape has to be [T, K], T at most {MAX_ROWS}, K a multiple of {DEPTH_MULTIPLE}")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        refuse("weight", weight, f"the shape has to be [N, K], K = {x.shape[1]} as of x")
    if gated and weight.shape[0] % 2:
        refuse("weight", weight, "gated, N has to be even: the gate's rows and those of the up projection")


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, gated: bool, overlap: bool
) -> None:
    dtype = check_dtype("x", x)
    if not x.is_cpu and dtype not in CUDA_DTYPES:
        raise TypeError(f"x: {dtype} on {x.device}; the kernel there takes {', '.join(map(str, CUDA_DTYPES))}")
    _check_shapes(x, weight, gated)
    rows = weight.shape[0]
    check_rows("x", x, dtype, x.shape, "[T, K]")
    check_rows("weight", weight, dtype, weight.shape, "[N, K]")
    if bias is not None:
        check_exactly("bias", bias, dtype, (rows,), "[N]")
    if out.dtype not in (dtype, torch.float32):
        raise TypeError(f"out: {out.dtype}; {dtype}, as of x, or torch.float32 is needed")
    shape, letters = ((x.shape[0], rows // 2), "[T, N / 2]") if gated else ((x.shape[0], rows), "[T, N]")
    check_rows("out", out, out.dtype, shape, letters)


def _skinny_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, gated: bool, overlap: bool
) -> None:
    _check(x, weight, bias, out, gated, overlap)
    _C.skinny_gemm(x, weight, bias, out, gated, overlap, stream_of(x))


_skinny_gemm_op = torch.library.custom_op(
    "research_engine::skinny_gemm",
    _skinny_gemm,
    mutates_args=("out",),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, bool gated, bool overlap) -> ()",
)
_skinny_gemm_op.register_fake(_check)
