"""Writing into the paged KV cache, reading requests out of it, moving whole blocks within it or between two."""

from __future__ import annotations

import torch

from research_engine.kernels._checks import (
    QUANTIZED_CACHE_DTYPES,
    check_blocks,
    check_dtype,
    check_exactly,
    check_last_contiguous,
    check_rows,
    check_scales,
    check_tiles,
    refuse,
)
from research_engine.kernels._extension import _C, check_scale_values, host, stream_of, traced


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    check_values: bool = False,
) -> None:
    """Writes each token's key and value into its slot; slot `s` is row `s % B` of block `s // B`.

    Args:
        key: `[T, Hkv, D]`, last dimension contiguous.
        value: `[T, Hkv, D]`, likewise.
        key_cache: `[N, Hkv, B, D]`, (block, head) tiles contiguous, of key's dtype, float8_e4m3fn or int8; changed. A
            quantised cache takes the float32 quotient `x / key_scale[head]`, rounded to the nearest, ties to even, and
            saturated at +-448 (float8_e4m3fn; NaN stays NaN) or +-127 (int8; NaN becomes 0).
        value_cache: likewise, of key_cache's dtype.
        slot_mapping: int64 `[S]`, contiguous, S <= T: tokens from S on are padding and not written. A slot is -1
            (skip) or in `[0, N * B)`. Two tokens with one slot: either may win.
        key_scale: float32 `[Hkv]`, contiguous, positive: of the heads of a quantised key cache; None for 1.
        value_scale: likewise.
        check_values: check slots and scales of a CUDA call too, which waits for the device; unchecked, a slot out of
            range is skipped. Those of a CPU call always are checked.

    Raises:
        TypeError: a dtype the device's kernels do not take, or one that differs from key's.
        ValueError: a shape, stride, device, slot or scale that breaks the rules above.
    """
    arguments = (key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    if traced(key):
        torch.ops.research_engine.reshape_and_cache(*arguments)
        return
    if check_values:
        check_reshape_and_cache(*arguments)
        _C.check_slots(host(slot_mapping), key_cache.shape[0] * key_cache.shape[2])
        check_scale_values(key_scale, value_scale)
    _reshape_and_cache(*arguments)


def gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    start_loc: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    check_values: bool = False,
) -> None:
    """Copies tokens of requests out of the paged cache into rows that lie one behind the other.

    Args:
        key_cache: `[N, Hkv, B, D]`, (block, head) tiles contiguous, of key's dtype, float8_e4m3fn or int8.
        value_cache: likewise, of key_cache's dtype.
        block_tables: int32 `[R, columns]`, rows contiguous.
        start_loc: int32 `[R + 1]`, contiguous: request r has rows `[start_loc[r], start_loc[r + 1])` of key and value.
            Rows past the last stay as they are.
        key: `[T, Hkv, D]`, last dimension contiguous; changed. Stored elements times their head's scale.
        value: likewise.
        starts: int32 `[R]`, contiguous: the token that a request's first row is; None for 0.
        key_scale: float32 `[Hkv]`, contiguous, of a quantised cache; None for 1.
        value_scale: likewise.
        check_values: check tables, rows and scales of a CUDA call too, which waits for the device; unchecked, tokens
            outside of table or cache are skipped. Those of a CPU call always are checked.

    Raises:
        TypeError: a dtype the device's kernels do not take.
        ValueError: a shape, stride, device or value that breaks the rules above.
    """
    arguments = (key_cache, value_cache, block_tables, start_loc, key, value, starts, key_scale, value_scale)
    if traced(key):
        torch.ops.research_engine.gather_cache(*arguments)
        return
    if check_values:
        _check_gather_cache(*arguments)
        host_starts = None if starts is None else host(starts)
        _C.check_gather(
            host(block_tables), host(start_loc), host_starts, key.shape[0], key_cache.shape[2], key_cache.shape[0]
        )
        check_scale_values(key_scale, value_scale)
    _gather_cache(*arguments)


def copy_blocks(kv_cache: torch.Tensor, pairs: torch.Tensor, *, check_values: bool = False) -> None:
    """Copies whole blocks inside one cache, in every layer, keys and values.

    Args:
        kv_cache: `[L, 2, N, Hkv, B, D]`, blocks contiguous; changed.
        pairs: int64 `[P, 2]`, contiguous, (source, destination) block ids on the host (checked, then copied to the
            cache's device) or on that device. No destination twice, and no source that is also a destination: copies
            run in no order.
        check_values: check pairs that are on a CUDA device too, which waits for it.

    Raises:
        TypeError: pairs that are not int64.
        ValueError: a shape, stride, device or pair that breaks the rules above.
    """
    if traced(kv_cache):
        torch.ops.research_engine.copy_blocks(kv_cache, pairs)
        return
    if check_values:
        _check_copy_blocks(kv_cache, pairs)
        _C.check_block_pairs(host(pairs), kv_cache.shape[2], kv_cache.shape[2], True)
    _copy_blocks(kv_cache, pairs)


def swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copies whole blocks from one cache to another, in every layer, keys and values: out to host memory, or back.

    On a CUDA device the copies are ordered on the current stream. They are asynchronous to the host, so the host's
    cache has to be pinned; it may be read or reused once the stream has passed them.

    Args:
        source: `[L, 2, N, Hkv, B, D]`, blocks contiguous.
        destination: `[L, 2, M, Hkv, B, D]`, likewise, of source's dtype; changed.
        pairs: int64 `[P, 2]`, contiguous, in host memory: (block of source, block of destination). No destination
            twice. The caller may reuse it at once.

    Raises:
        TypeError: pairs that are not int64, or caches of two dtypes.
        ValueError: a shape, stride, device or pair that breaks the rules above, or host memory that is not pinned.
    """
    if traced(source):
        torch.ops.research_engine.swap_blocks(source, destination, pairs)
    else:
        _swap_blocks(source, destination, pairs)


def check_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and strides of `reshape_and_cache`'s arguments."""
    dtype = check_dtype("key", key)
    shape = key.shape
    if len(shape) != 3:
        refuse("key", key, "the shape has to be [T, Hkv, D]")
    check_last_contiguous("key", key)
    check_rows("value", value, dtype, shape, "key's, [T, Hkv, D]")
    if key_cache.dim() != 4:
        refuse("key_cache", key_cache, "the shape has to be [N, Hkv, B, D]")
    cache_shape = key_cache.shape
    if key_cache.dtype in QUANTIZED_CACHE_DTYPES:
        dtype = key_cache.dtype
    check_rows("key_cache", key_cache, dtype, (cache_shape[0], shape[1], cache_shape[2], shape[2]), "[N, Hkv, B, D]")
    check_rows("value_cache", value_cache, dtype, cache_shape, "key_cache's, [N, Hkv, B, D]")
    check_tiles("key_cache", key_cache)
    if value_cache.stride() != key_cache.stride():
        check_tiles("value_cache", value_cache)
    if key_scale is not None or value_scale is not None:
        check_scales(key_cache, shape[1], key_scale, value_scale)
    if slot_mapping.dim() != 1:
        refuse("slot_mapping", slot_mapping, "the shape has to be [S]")
    check_exactly("slot_mapping", slot_mapping, torch.int64, slot_mapping.shape, "[S]")
    if slot_mapping.shape[0] > shape[0]:
        refuse("slot_mapping", slot_mapping, f"there are more slots than tokens (key has {shape[0]} rows)")


def _reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    check_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)
    _C.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, stream_of(key))


def _check_gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    start_loc: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    no_slots = torch.empty(0, dtype=torch.int64, device="meta")  # the rules of rows and caches are those of the write
    check_reshape_and_cache(key, value, key_cache, value_cache, no_slots, key_scale, value_scale)
    if block_tables.dim() != 2:
        refuse("block_tables", block_tables, "the shape has to be [R, columns]")
    check_rows("block_tables", block_tables, torch.int32, block_tables.shape, "[R, columns]")
    requests = block_tables.shape[0]
    check_exactly("start_loc", start_loc, torch.int32, (requests + 1,), "[R + 1]")
    if starts is not None:
        check_exactly("starts", starts, torch.int32, (requests,), "[R]")


def _gather_cache(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    start_loc: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
) -> None:
    _check_gather_cache(key_cache, value_cache, block_tables, start_loc, key, value, starts, key_scale, value_scale)
    _C.gather_cache(
        key_cache, value_cache, block_tables, start_loc, starts, key, value, key_scale, value_scale, stream_of(key)
    )


def _check_pairs(pairs: torch.Tensor) -> None:
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        refuse("pairs", pairs, "the shape has to be [P, 2]")
    check_exactly("pairs", pairs, torch.int64, pairs.shape, "[P, 2]")


def _check_copy_blocks(kv_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    check_blocks("kv_cache", kv_cache)
    _check_pairs(pairs)


def _copy_blocks(kv_cache: torch.Tensor, pairs: torch.Tensor) -> None:
    _check_copy_blocks(kv_cache, pairs)
    stream = stream_of(kv_cache)
    if pairs.is_cpu and not kv_cache.is_cpu:
        _C.check_block_pairs(pairs, kv_cache.shape[2], kv_cache.shape[2], True)
        pairs = pairs.to(kv_cache.device)
    _C.copy_blocks(kv_cache, pairs, stream)


def _check_swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    check_blocks("source", source)
    check_blocks("destination", destination)
    if destination.dtype != source.dtype:
        raise TypeError(f"destination: {destination.dtype}; source's {source.dtype} is needed")
    if destination.shape[:2] != source.shape[:2] or destination.shape[3:] != source.shape[3:]:
        refuse("destination", destination, f"all but the number of blocks has to be as in source, {list(source.shape)}")
    _check_pairs(pairs)
    if not pairs.is_cpu:
        refuse("pairs", pairs, "it has to be in host memory")


def _swap_blocks(source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor) -> None:
    _check_swap_blocks(source, destination, pairs)
    on_device = destination if source.is_cpu else source
    stream = stream_of(on_device)
    if not on_device.is_cpu:
        for name, cache in (("source", source), ("destination", destination)):
            if cache.is_cpu and not cache.is_pinned():
                refuse(
                    name,
                    cache,
                    "host memory that is swapped with a GPU has to be pinned: torch.empty(..., pin_memory=True)",
                )
    _C.swap_blocks(source, destination, pairs, stream)


_reshape_and_cache_op = torch.library.custom_op(
    "research_engine::reshape_and_cache",
    _reshape_and_cache,
    mutates_args=("key_cache", "value_cache"),
    schema=(
        "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
        "Tensor? key_scale, Tensor? value_scale) -> ()"
    ),
)
_reshape_and_cache_op.register_fake(check_reshape_and_cache)

_gather_cache_op = torch.library.custom_op(
    "research_engine::gather_cache",
    _gather_cache,
    mutates_args=("key", "value"),
    schema=(
        "(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor start_loc, Tensor(a!) key, "
        "Tensor(b!) value, Tensor? starts, Tensor? key_scale, Tensor? value_scale) -> ()"
    ),
)
_gather_cache_op.register_fake(_check_gather_cache)

_copy_blocks_op = torch.library.custom_op(
    "research_engine::copy_blocks",
    _copy_blocks,
    mutates_args=("kv_cache",),
    schema="(Tensor(a!) kv_cache, Tensor pairs) -> ()",
)
_copy_blocks_op.register_fake(_check_copy_blocks)

_swap_blocks_op = torch.library.custom_op(
    "research_engine::swap_blocks",
    _swap_blocks,
    mutates_args=("destination",),
    schema="(Tensor source, Tensor(a!) destination, Tensor pairs) -> ()",
)
_swap_blocks_op.register_fake(_check_swap_blocks)
