"""What the attention of one step needs to know about the batch: where keys and values go, and what each row may see."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# T tokens of the step, R requests, L layers, N blocks, B block size, Hkv KV heads, D head size


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's view of the paged cache. Rows of a request are contiguous, requests in the order of ``seq_lens``."""

    kv_cache: torch.Tensor  # [L, 2, N, Hkv, B, D], the model's dtype, float8_e4m3fn or int8
    slot_mapping: torch.Tensor  # int64 [T], block * B + offset; -1: the token is not stored
    block_tables: torch.Tensor  # int32 [R, max_blocks]
    query_start_loc: torch.Tensor  # int32 [R + 1], first row of each request
    seq_lens: torch.Tensor  # int32 [R], context length with this step's tokens
    max_query_len: int
    max_seq_len: int
    workspace: torch.Tensor | None = None  # float32, as `paged_attention` takes it; the op's own when None
    kv_scales: torch.Tensor | None = None  # float32 [L, 2, Hkv] of a quantised cache; None for 1

    def scales(self, layer: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Of a layer's keys and values, each float32 ``[Hkv]`` or None, as the kernels take them."""
        return (None, None) if self.kv_scales is None else (self.kv_scales[layer, 0], self.kv_scales[layer, 1])
