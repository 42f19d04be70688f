"""Scales of a quantised KV cache: those of the checkpoint, or measured by running the model on random tokens."""

from __future__ import annotations

from typing import Protocol

import torch

from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.config import ModelConfig

_TOKENS = 512
_HEADROOM = 1.5  # largest value that fits, against the largest one measured; beyond it, values are saturated
_LARGEST = 127


class Model(Protocol):
    """What is needed of a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kv_scales: torch.Tensor | None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata
    ) -> torch.Tensor: ...


def kv_scales(model: Model, cache_dtype: torch.dtype) -> torch.Tensor | None:
    """Scales of the model's cache, float32 ``[L, 2, Hkv]``; None for scales of 1.

    float8 has an exponent of its own, so that a scale of 1 does where the checkpoint brings none. int8 has not: its
    scales are measured, for every head.
    """
    if cache_dtype == torch.int8:
        return measured_kv_scales(model)
    if cache_dtype != torch.float8_e4m3fn or model.kv_scales is None:
        return None
    scales: torch.Tensor = model.kv_scales[:, :, None].expand(-1, -1, model.config.num_kv_heads)
    return scales.contiguous().to(model.device)


@torch.inference_mode()
def measured_kv_scales(model: Model) -> torch.Tensor:
    """Scales of an int8 cache from the largest keys and values of each head over random tokens, with some room."""
    config, device = model.config, model.device
    count = min(_TOKENS, config.max_position_embeddings)
    token_ids = torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(0))
    if config.bos_token_id is not None:
        token_ids[0] = config.bos_token_id  # what all attend to, with values out of the ordinary in many models
    shape = (config.num_layers, 2, 1, config.num_kv_heads, count, config.head_dim)
    cache = torch.zeros(shape, dtype=model.dtype, device=device)
    positions = torch.arange(count, device=device)
    model.forward(
        token_ids.to(device),
        positions,
        AttentionMetadata(
            kv_cache=cache,
            slot_mapping=positions,
            block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, count], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=device),
            max_query_len=count,
            max_seq_len=count,
        ),
    )
    return cache.abs().amax(dim=(2, 4, 5)).float().mul_(_HEADROOM / _LARGEST).clamp_min_(1e-8)
