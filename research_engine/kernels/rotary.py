"""Rotary position embedding of queries and keys, alone and fused with the write into the KV cache."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import (
    check_dtype,
    check_exactly,
    check_last_contiguous,
    check_rows,
    refuse,
)
from research_engine.kernels._extension import _C, check_scale_values, host, stream_of, traced
from research_engine.kernels.cache import check_reshape_and_cache


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


def rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    interleaved: bool = False,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    check_values: bool = False,
) -> None:
    """`rotary_embedding`, then `reshape_and_cache`, in one pass: the rotated keys go to the cache alone.

    Queries are rotated in place; `key` stays as it is. The bits are those of the two ops.

    Args:
        positions, query, cos_sin, interleaved: as in `rotary_embedding`.
        key: `[T, Hkv, D]`, last dimension contiguous, of query's dtype; not changed.
        value, key_cache, value_cache, slot_mapping, key_scale, value_scale: as in `reshape_and_cache`.
        check_values: check positions, slots and scales of a CUDA call too, which waits for the device. Those of a CPU
            call always are.

    Raises:
        TypeError, ValueError: as the two ops.
    """
    arguments = (
        positions, query, key, value, cos_sin, key_cache, value_cache, slot_mapping, interleaved, key_scale,
        value_scale,
    )  # fmt: skip
    if traced(query):
        torch.ops.research_engine.rotary_and_cache(*arguments)
        return
    if check_values:
        _check_rotary_and_cache(*arguments)
        _C.check_positions(host(positions), cos_sin.shape[0])
        _C.check_slots(host(slot_mapping), key_cache.shape[0] * key_cache.shape[2])
        check_scale_values(key_scale, value_scale)
    _rotary_and_cache(*arguments)


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


def _check_rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    _check(positions, query, key, cos_sin, interleaved)
    check_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def _rotary_and_cache(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    arguments = (
        positions, query, key, value, cos_sin, key_cache, value_cache, slot_mapping, interleaved, key_scale,
        value_scale,
    )  # fmt: skip
    _check_rotary_and_cache(*arguments)
    _C.rotary_and_cache(*arguments, stream_of(query))


_rotary_and_cache_op = torch.library.custom_op(
    "research_engine::rotary_and_cache",
    _rotary_and_cache,
    mutates_args=("query", "key_cache", "value_cache"),
    schema=(
        "(Tensor positions, Tensor(a!) query, Tensor key, Tensor value, Tensor cos_sin, Tensor(b!) key_cache, "
        "Tensor(c!) value_cache, Tensor slot_mapping, bool interleaved, Tensor? key_scale, Tensor? value_scale) -> ()"
    ),
)
_rotary_and_cache_op.register_fake(_check_rotary_and_cache)
