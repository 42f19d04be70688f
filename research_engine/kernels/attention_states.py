"""Attention over two disjoint sets of keys, put together."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import check_dtype, check_exactly, check_last_contiguous, check_rows, refuse
from research_engine.kernels._extension import _C, stream_of, traced


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b)` and its lse, as if attention had seen both sets of keys.

    A row without keys in one set (lse -inf) is the other's; without keys in both, 0 and -inf (Dao et al.,
    Flash-Decoding, 2023).

    Args:
        out_a: `[T, Hq, D]`, last dimension contiguous.
        lse_a: float32 `[T, Hq]`, contiguous, natural logarithms, as `paged_attention` gives them.
        out_b, lse_b: likewise.
        out: `[T, Hq, D]`, last dimension contiguous; may be out_a or out_b; made when None.
        lse: float32 `[T, Hq]`, contiguous; may be lse_a or lse_b; made when None.

    Returns:
        `out`, `lse`.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from out_a's.
        ValueError: a shape, stride or device that breaks the rules above.
    """
    if out is None:
        out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    if lse is None:
        lse = torch.empty_like(lse_a, memory_format=torch.contiguous_format)
    if traced(out_a):
        torch.ops.research_engine.merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)
    else:
        _merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


def _check(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    dtype = check_dtype("out_a", out_a)
    shape = out_a.shape
    if len(shape) != 3:
        refuse("out_a", out_a, "the shape has to be [T, Hq, D]")
    check_last_contiguous("out_a", out_a)
    check_rows("out_b", out_b, dtype, shape, "out_a's, [T, Hq, D]")
    check_rows("out", out, dtype, shape, "out_a's, [T, Hq, D]")
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        check_exactly(name, tensor, torch.float32, shape[:2], "[T, Hq]")


def _merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    _check(out_a, lse_a, out_b, lse_b, out, lse)
    _C.merge_attention_states(out_a, lse_a, out_b, lse_b, out, lse, stream_of(out_a))


_merge_attention_states_op = torch.library.custom_op(
    "research_engine::merge_attention_states",
    _merge_attention_states,
    mutates_args=("out", "lse"),
    schema="(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, Tensor(a!) out, Tensor(b!) lse) -> ()",
)
_merge_attention_states_op.register_fake(_check)
