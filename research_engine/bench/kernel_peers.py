"""Other libraries' kernels on the inputs of the kernels' benchmark; a library is imported when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from research_engine.bench.kernel_timing import Results, Run
from research_engine.loading.packing import AWQ_ORDER


@dataclass(frozen=True)
class AttentionInputs:
    """B requests of q queries and L keys each, causal.

    Attributes:
        query: `[B * q, Hq, D]`.
        key_cache: `[N, Hkv, block, D]`.
        value_cache: likewise.
        block_tables: int32 `[B, ceil(L / block)]`, in no order.
        query_start_loc: int32 `[B + 1]`.
        seq_lens: int32 `[B]`, all L.
        queries: q.
        keys: L.
        scale: of the scores.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    queries: int
    keys: int
    scale: float


def sdpa(inputs: AttentionInputs) -> Run:
    """torch's `scaled_dot_product_attention` on K and V gathered beforehand into contiguous `[B, Hkv, L, D]`."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    def gathered(cache: torch.Tensor) -> torch.Tensor:
        blocks = cache[inputs.block_tables.long()].transpose(1, 2)  # [B, Hkv, blocks, block, D]
        return blocks.flatten(2, 3)[:, :, : inputs.keys].contiguous()

    keys, values = gathered(inputs.key_cache), gathered(inputs.value_cache)
    query = inputs.query.unflatten(0, (-1, inputs.queries)).transpose(1, 2).contiguous()  # [B, Hq, q, D]
    square = inputs.queries == inputs.keys
    mask = None if square or inputs.queries == 1 else causal_lower_right(inputs.queries, inputs.keys)

    def run() -> Results:
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=square, scale=inputs.scale, enable_gqa=True
        )
        return (out.transpose(1, 2),)

    return run


def flashinfer(inputs: AttentionInputs) -> Run:
    """FlashInfer's batch wrappers, planned beforehand: decode on tensor cores; prefill with the backend it chooses."""
    import flashinfer

    device, dtype = inputs.query.device, inputs.query.dtype
    keys, values = _token_major(inputs)
    block_size, num_kv_heads, head_size = keys.shape[1:]
    num_requests, num_blocks = inputs.block_tables.shape
    block_starts = torch.arange(num_requests + 1, dtype=torch.int32, device=device) * num_blocks
    blocks = inputs.block_tables.flatten()
    last = torch.full((num_requests,), (inputs.keys - 1) % block_size + 1, dtype=torch.int32, device=device)
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device=device)
    sizes = (inputs.query.shape[1], num_kv_heads, head_size, block_size)
    if inputs.queries == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(block_starts, blocks, last, *sizes, sm_scale=inputs.scale, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(
            inputs.query_start_loc, block_starts, blocks, last, *sizes, causal=True, sm_scale=inputs.scale,
            q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip
    return lambda: (wrapper.run(inputs.query, (keys, values)),)


def flash_attention_3(inputs: AttentionInputs) -> Run:
    """FlashAttention-3 as vLLM ships it."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    keys, values = _token_major(inputs)
    out = torch.empty_like(inputs.query)

    def run() -> Results:
        flash_attn_varlen_func(
            inputs.query, keys, values, max_seqlen_q=inputs.queries, cu_seqlens_q=inputs.query_start_loc,
            max_seqlen_k=inputs.keys, seqused_k=inputs.seq_lens, block_table=inputs.block_tables,
            softmax_scale=inputs.scale, causal=True, out=out, fa_version=3,
        )  # fmt: skip
        return (out,)

    return run


def _token_major(inputs: AttentionInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The caches as these libraries lay them out, `[N, block, Hkv, D]`."""
    return inputs.key_cache.transpose(1, 2).contiguous(), inputs.value_cache.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class PackedInputs:
    """x and a weight of 4-bit integers with zero points, as AWQ's.

    Attributes:
        x: `[T, K]`, 16-bit floats.
        codes: uint8 `[N, K]`.
        scales: `[G, N]`, of x's dtype.
        zeros: uint8 `[G, N]`.
    """

    x: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def marlin(inputs: PackedInputs) -> Run:
    """vLLM's Marlin, the weight laid out for it beforehand, sums in float32 as vLLM runs it."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils as utils
    from vllm.scalar_type import scalar_types

    (columns, depth), device = inputs.codes.shape, inputs.x.device
    groups = inputs.scales.shape[0]
    in_order = inputs.codes.T.reshape(depth, -1, 8)[:, :, list(AWQ_ORDER)]
    weight = ops.awq_marlin_repack(_words(in_order), depth, columns, 4)
    scales = utils.marlin_permute_scales(inputs.scales, depth, columns, depth // groups)
    zeros = utils.marlin_zero_points(inputs.zeros.int(), groups, columns, 4)
    workspace, none = utils.marlin_make_workspace_new(device), utils.marlin_make_empty_g_idx(device)

    def run() -> Results:
        out = ops.marlin_gemm(
            inputs.x, None, weight, None, scales, None, None, zeros, none, none, workspace, scalar_types.uint4,
            size_m=inputs.x.shape[0], size_n=columns, size_k=depth, use_fp32_reduce=True,
        )  # fmt: skip
        return (out,)

    return run


def machete(inputs: PackedInputs) -> Run:
    """vLLM's Machete, which it prefers on Hopper: the weight laid out for it, zero points times scales, beforehand."""
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    dtype, (columns, depth) = inputs.x.dtype, inputs.codes.shape
    words = _words(inputs.codes.reshape(columns, -1, 8))  # [N, K / 8], which it takes as [K / 8, N] of these strides
    weight = ops.machete_prepack_B(words.T, a_type=dtype, b_type=scalar_types.uint4, group_scales_type=dtype)
    zeros = (-inputs.scales * inputs.zeros.to(dtype)).contiguous()

    def run() -> Results:
        out = ops.machete_mm(
            a=inputs.x, b_q=weight, b_type=scalar_types.uint4, b_group_zeros=zeros, b_group_scales=inputs.scales,
            b_group_size=depth // inputs.scales.shape[0],
        )  # fmt: skip
        return (out,)

    return run


def _words(codes: torch.Tensor) -> torch.Tensor:
    """uint8 `[..., 8]` of 4 bits -> int32 `[...]`, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (codes.int() << shifts).sum(-1, dtype=torch.int32)
