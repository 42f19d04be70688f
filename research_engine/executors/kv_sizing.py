"""How large the KV cache may be: bytes a block, memory that is free, and the number of blocks that follow from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from research_engine.models.config import ModelConfig

CPU_SHARE = 0.25  # of the free host memory, at most, when nothing else is asked for
_CGROUP = Path("/sys/fs/cgroup")


def kv_bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    return config.kv_bytes_per_token * block_size * dtype.itemsize


def free_host_memory() -> int:
    """Bytes that this process could still allocate without swapping, its control group's limit included."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") if hasattr(os, "sysconf") else 4 << 30
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        if "MemAvailable" in fields:
            free = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return max(0, free)


def activation_bytes(config: ModelConfig, dtype: torch.dtype, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """An upper estimate of what one step allocates beside weights and cache: hidden states, products, logits."""
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 4 * config.hidden_size + attention + 3 * config.intermediate_size
    per_token += config.experts_per_token * (3 * config.hidden_size + 3 * config.expert_size)
    sampled = min(max_num_seqs, max_num_batched_tokens)
    return per_token * dtype.itemsize * max_num_batched_tokens + 3 * 4 * config.vocab_size * sampled


def cache_budget(
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
) -> int:
    """Bytes to give to the KV cache when the user names none, the model's weights being loaded already."""
    if device.type == "cpu":
        return int(free_host_memory() * CPU_SHARE)
    free, total = torch.cuda.mem_get_info(device)
    needed = activation_bytes(config, dtype, max_num_batched_tokens, max_num_seqs)
    return max(0, int(free - (1.0 - gpu_memory_utilization) * total - needed))
