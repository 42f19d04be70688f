"""The ops of LLM inference as hand-written kernels: typed fronts, checked arguments, a float64 oracle (`reference`).

Every op runs where its tensors are: CPU (float32, bfloat16) or CUDA (float32, bfloat16, float16), there on torch's
current stream. Each is registered with torch.library under `torch.ops.research_engine`.
"""

from __future__ import annotations

from research_engine.kernels import jit, reference
from research_engine.kernels.activation import silu_and_mul
from research_engine.kernels.attention import paged_attention, paged_attention_workspace
from research_engine.kernels.attention_states import merge_attention_states
from research_engine.kernels.build_info import build_info
from research_engine.kernels.cache import copy_blocks, gather_cache, reshape_and_cache, swap_blocks
from research_engine.kernels.gemm import skinny_gemm, skinny_gemm_rows
from research_engine.kernels.norm import fused_add_rms_norm, rms_norm
from research_engine.kernels.quantized import (
    QuantizedWeight,
    dequantize_weight,
    pack_weight,
    quantized_matmul,
    quantized_matmul_workspace,
)
from research_engine.kernels.rotary import rotary_and_cache, rotary_embedding
from research_engine.kernels.sampling import Sampled, sample, sample_workspace

__all__ = [
    "paged_attention",
    "paged_attention_workspace",
    "reshape_and_cache",
    "merge_attention_states",
    "gather_cache",
    "copy_blocks",
    "swap_blocks",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "rotary_and_cache",
    "silu_and_mul",
    "skinny_gemm",
    "skinny_gemm_rows",
    "QuantizedWeight",
    "pack_weight",
    "quantized_matmul",
    "quantized_matmul_workspace",
    "dequantize_weight",
    "sample",
    "sample_workspace",
    "Sampled",
    "reference",
    "jit",
    "build_info",
]
