"""Runs a model over a small paged cache with shuffled blocks, for tests that compare logits or greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.decoder import Decoder


class PagedRun:
    """A few requests side by side. Blocks are handed out in shuffled order and start as NaN, so that a read of a slot
    that was never written shows."""

    def __init__(self, model: Decoder, num_requests: int, max_len: int, block_size: int = 16, seed: int = 0) -> None:
        self.model, self.block_size = model, block_size
        per_request = -(-max_len // block_size)
        num_blocks = num_requests * per_request + 1
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))[: num_requests * per_request]
        self.tables = order.reshape(num_requests, per_request).to(torch.int32)
        config = model.config
        self.cache = torch.full(
            (config.num_layers, 2, num_blocks, config.num_kv_heads, block_size, config.head_dim),
            float("nan"),
            dtype=model.dtype,
            device=model.device,
        )
        self.lengths = [0] * num_requests

    def step(self, tokens: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Feed each request its next tokens (none: it sits out); logits ``[len(tokens[r]), V]``. Mutates the cache."""
        rows = [r for r, new in enumerate(tokens) if new]
        flat = [token for r in rows for token in tokens[r]]
        positions = [self.lengths[r] + i for r in rows for i in range(len(tokens[r]))]
        slots = [
            int(self.tables[r, p // self.block_size]) * self.block_size + p % self.block_size
            for r in rows
            for p in range(self.lengths[r], self.lengths[r] + len(tokens[r]))
        ]
        counts = [len(tokens[r]) for r in rows]
        for r in rows:
            self.lengths[r] += len(tokens[r])
        seq_lens = [self.lengths[r] for r in rows]
        device = self.model.device
        attention = AttentionMetadata(
            kv_cache=self.cache,
            slot_mapping=torch.tensor(slots, device=device),
            block_tables=self.tables[rows].to(device),
            query_start_loc=torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            max_query_len=max(counts),
            max_seq_len=max(seq_lens),
        )
        hidden = self.model.forward(
            torch.tensor(flat, device=device), torch.tensor(positions, device=device), attention
        )
        parts = iter(self.model.compute_logits(hidden).split(counts))
        return [next(parts) if new else torch.empty(0) for new in tokens]

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Prefill all prompts in one step, then decode ``num_tokens`` each."""
        out: list[list[int]] = [[] for _ in prompts]
        new: list[list[int]] = [list(prompt) for prompt in prompts]
        for _ in range(num_tokens):
            for r, logits in enumerate(self.step(new)):
                new[r] = [int(logits[-1].argmax())]
                out[r] += new[r]
        return out
