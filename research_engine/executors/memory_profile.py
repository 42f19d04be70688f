"""What a model takes of a GPU's memory beside its KV cache, by running its largest step once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from research_engine.executors.memory_plan import MemoryPlan
from research_engine.executors.torch_executor import Decoder
from research_engine.models.attention_metadata import AttentionMetadata


def measured_plan(
    model: Decoder,
    *,
    utilization: float,
    kv_bytes_per_token: int,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    graphs: Sequence[int],
    token_graphs: Sequence[int],
) -> MemoryPlan:
    """The plan of the GPU that holds the model's weights, from a run of the largest step.

    Args:
        graphs: rows of the decode steps that will be CUDA graphs.
        token_graphs: tokens of the other steps that will be CUDA graphs, each with logits of max_num_seqs rows.
        others: as in MemoryPlan and EngineConfig.
    """
    device = model.device
    weights = torch.cuda.memory_allocated(device)
    sampled = min(max_num_seqs, max_num_batched_tokens)
    activations = step_bytes(model, num_tokens=max_num_batched_tokens, num_drawn=sampled, block_size=block_size)
    # each kind of graph has a pool, which holds what the largest of them takes and the logits of every one
    largest = [max(sizes) for sizes in (graphs, token_graphs) if sizes]
    pool = sum(step_bytes(model, num_tokens=size, num_drawn=sampled, block_size=block_size) for size in largest)
    pool += (sum(graphs) + len(token_graphs) * sampled) * model.config.vocab_size * model.dtype.itemsize
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemoryPlan(
        total=total,
        utilization=utilization,
        weights=weights,
        activations=activations,
        other=max(0, total - free - weights) + pool,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
        max_model_len=max_model_len,
    )


@torch.inference_mode()
def step_bytes(model: Decoder, *, num_tokens: int, num_drawn: int, block_size: int) -> int:
    """Peak bytes of a step of one prompt of `num_tokens` tokens that draws `num_drawn` of them.

    The step reads and writes one block alone, over and over: what it computes is of no use, what it allocates is.

    Args:
        model: on a CUDA device, with its weights loaded.
    """
    config, device = model.config, model.device
    cache = torch.zeros(
        (config.num_layers, 2, 1, config.num_kv_heads, block_size, config.head_dim), dtype=model.dtype, device=device
    )
    width = -(-num_tokens // block_size)
    attention = AttentionMetadata(
        kv_cache=cache,
        slot_mapping=torch.arange(num_tokens, device=device) % block_size,
        block_tables=torch.zeros((1, width), dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    positions = torch.arange(num_tokens, device=device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden_TH = model.forward(token_ids, positions, attention)
    model.compute_logits(hidden_TH[:num_drawn])
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
