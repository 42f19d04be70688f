"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import (
    check_dtype,
    check_exactly,
    check_last_contiguous,
    check_rows,
    refuse,
)
from research_engine.kernels._extension import _C, host, stream_of, traced


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    interleaved: bool = False,
    check_values: bool = False,
) -> None:
    """Rotates pairs `(a, b)` of every head to `(a cos - b sin, b cos + a sin)` in place (Su et al., 2104.09864).

    Args:
        positions: int64 `[T]`, contiguous, each in `[0, max_position)`.
        query: `[T, Hq, D]`, last dimension contiguous; changed.
        key: `[T, Hkv, D]`, likewise; changed.
        cos_sin: float32 `[max_position, rotary_dim]`, rows contiguous: the cosines of `rotary_dim / 2` angles, then
            their sines. `rotary_dim` is even and at most D; elements of a head past it stay.
        interleaved: pairs are `(2i, 2i + 1)`; otherwise `(i, i + rotary_dim / 2)`.
        check_values: check the positions of a CUDA call too, which waits for the device. Those of a CPU call always
            are.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from query's.
        ValueError: a shape, stride, device or position that breaks the rules above.
    """
    if traced(query):
        torch.ops.research_engine.rotary_embedding(positions, query, key, cos_sin, interleaved)
        return
    if check_values:
        _check(positions, query, key, cos_sin, interleaved)
        _C.check_positions(host(positions), cos_sin.shape[0])
    _rotary_embedding(positions, query, key, cos_sin, interleaved)


def _check(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    dtype = check_dtype("query", query)
    shape = query.shape
    if len(shape) != 3:
        refuse("query", query, "the shape has to be [T, Hq, D]")
    check_last_contiguous("query", query)
    if key.dim() != 3:
        refuse("key", key, "the shape has to be [T, Hkv, D]")
    check_rows("key", key, dtype, (shape[0], key.shape[1], shape[2]), "[T, Hkv, D]")
    check_exactly("positions", positions, torch.int64, shape[:1], "[T]")
    rotary_dim = cos_sin.shape[-1]
    if cos_sin.dim() != 2 or rotary_dim % 2 or rotary_dim > shape[2]:
        refuse(
            "cos_sin",
            cos_sin,
            f"the shape has to be [max_position, rotary_dim], rotary_dim even and at most D = {shape[2]}",
        )
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"cos_sin: {cos_sin.dtype}; torch.float32 is needed")
    check_last_contiguous("cos_sin", cos_sin)


def _rotary_embedding(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool
) -> None:
    _check(positions, query, key, cos_sin, interleaved)
    _C.rotary_embedding(positions, query, key, cos_sin, interleaved, stream_of(query))


_rotary_embedding_op = torch.library.custom_op(
    "research_engine::rotary_embedding",
    _rotary_embedding,
    mutates_args=("query", "key"),
    schema="(Tensor positions, Tensor(a!) query, Tensor(b!) key, Tensor cos_sin, bool interleaved) -> ()",
)
_rotary_embedding_op.register_fake(_check)
