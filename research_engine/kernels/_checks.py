"""Checks of shapes, dtypes and strides at the Python edge. An error names the argument, what it is and the rule.

The passing case is a few comparisons; words are put together only when something is wrong. That all tensors are on one
device, and the values of those in host memory, are checked in the extension, where it costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

CPU_DTYPES = (torch.float32, torch.bfloat16)
CUDA_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED_CACHE_DTYPES = (torch.float8_e4m3fn, torch.int8)


def refuse(name: str, tensor: torch.Tensor, rule: str) -> NoReturn:
    """Raises ValueError for a tensor argument."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    raise ValueError(f"{name}: shape {shape}, strides {strides}, {tensor.dtype} on {tensor.device}; {rule}")


def check_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    """The tensor's dtype, if its device's kernels take it; else TypeError."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: a torch.Tensor is needed, not {type(tensor).__name__}")
    dtype = tensor.dtype
    if dtype not in (CPU_DTYPES if tensor.is_cpu else CUDA_DTYPES):
        supported = ", ".join(str(d) for d in (CPU_DTYPES if tensor.is_cpu else CUDA_DTYPES))
        raise TypeError(f"{name}: {dtype} on {tensor.device}; the kernels there take {supported}")
    return dtype


def check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], letters: str) -> None:
    """A tensor of this dtype and shape (letters say it in words), whose last dimension is contiguous."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: {tensor.dtype}; {dtype} is needed, as of the other arguments")
    if tensor.shape != shape:
        refuse(name, tensor, f"the shape has to be {letters} = {list(shape)}")
    if tensor.stride(-1) != 1:
        check_last_contiguous(name, tensor)


def check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Elements along the last dimension are neighbours; the other strides are free."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        refuse(name, tensor, "the last dimension has to be contiguous (stride 1)")


def check_exactly(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], letters: str) -> None:
    """A contiguous tensor of this dtype and shape."""
    if tensor.dtype is not dtype:
        raise TypeError(f"{name}: {tensor.dtype}; {dtype} is needed")
    if tensor.shape != shape:
        refuse(name, tensor, f"the shape has to be {letters} = {list(shape)}")
    if not tensor.is_contiguous():
        refuse(name, tensor, "it has to be contiguous")


def check_tiles(name: str, cache: torch.Tensor) -> None:
    """A cache [..., Hkv, B, D] whose (block, head) tiles are contiguous."""
    strides, head_size = cache.stride(), cache.shape[-1]
    if (strides[-1] != 1 and head_size > 1) or (strides[-2] != head_size and cache.shape[-2] > 1):
        refuse(name, cache, "a (block, head) tile [B, D] has to be contiguous")


def check_scales(
    cache: torch.Tensor, num_kv_heads: int, key_scale: torch.Tensor | None, value_scale: torch.Tensor | None
) -> None:
    """Scales [Hkv] of a quantised cache's heads, both of them optional; a cache of floats has none."""
    for name, scales in (("key_scale", key_scale), ("value_scale", value_scale)):
        if scales is None:
            continue
        if cache.dtype not in QUANTIZED_CACHE_DTYPES:
            refuse(name, scales, f"caches of {cache.dtype} have no scales; those of float8_e4m3fn and int8 have")
        check_exactly(name, scales, torch.float32, (num_kv_heads,), "[Hkv]")


def check_blocks(name: str, cache: torch.Tensor) -> None:
    """A whole cache [L, 2, N, Hkv, B, D] whose blocks [Hkv, B, D] are contiguous."""
    if cache.dim() != 6 or cache.shape[1] != 2:
        refuse(name, cache, "the shape has to be [L, 2, N, Hkv, B, D]")
    check_tiles(name, cache)
    if cache.stride(3) != cache.shape[4] * cache.shape[5] and cache.shape[3] > 1:
        refuse(name, cache, "a block [Hkv, B, D] has to be contiguous")
