"""Computes batches with torch and the project's kernels, on a CPU or on one CUDA device.

A step is one forward over the tokens of all rows, back to back without padding:

    rows            A: 3 tokens from 5        B: 1 token from 40      (prefill and decode alike)
    token_ids       a5  a6  a7                b40                     int64 [T]
    positions        5   6   7                 40                     int64 [T]
    slot_mapping    table[A][5 // B] * B + 5 % B ...                  int64 [T]
    query_start_loc  0                          3              4      int32 [R + 1]
    seq_lens         8                         41                     int32 [R]
    logits of       a7 (if it is A's last token), b40                 float32 [S, V]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from research_engine import kernels
from research_engine.engine.contract import Batch, ScheduledRequest, StepResult, TokenLogprobs
from research_engine.executors.block_tables import BlockTables
from research_engine.executors.logprobs import token_logprobs
from research_engine.executors.sampler import sample
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.config import ModelConfig

_PROMPT_LOGITS_AT_ONCE = 128  # rows of [V] float32 logits held at a time for prompt_logprobs


class Decoder(Protocol):
    """What the executor needs of a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor: ...


class TorchExecutor:
    """Owns the model, its KV cache and the host blocks for swapping.

    Args:
        model: with its weights loaded; its device and dtype are the cache's.
        num_blocks: device blocks, as in EngineConfig.
        block_size: token slots per block.
        num_host_blocks: blocks in host memory, pinned when the model is on a GPU.

    Attributes:
        kv_cache: [L, 2, num_blocks, Hkv, block_size, D] in the model's dtype.
        host_cache: [L, 2, num_host_blocks, Hkv, block_size, D].
    """

    def __init__(self, model: Decoder, *, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        config = model.config
        self.device = model.device
        self._model: Decoder | None = model
        self._block_size = block_size
        self._tables = BlockTables()
        tile = (config.num_kv_heads, block_size, config.head_dim)
        # never initialised: a slot is read only after it was written, and untouched pages cost no memory on a CPU
        self.kv_cache = torch.empty((config.num_layers, 2, num_blocks, *tile), dtype=model.dtype, device=model.device)
        self.host_cache = torch.empty(
            (config.num_layers, 2, num_host_blocks, *tile), dtype=model.dtype, pin_memory=model.device.type == "cuda"
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> StepResult:
        """Move blocks, compute the rows, draw tokens. Changes no request.

        Raises:
            ValueError: the model's logits are no numbers, or KV comes with a request; names the request.
        """
        if self._model is None:
            raise RuntimeError("the executor was shut down")
        if batch.received:
            name = batch.received[0][0].id
            raise ValueError(f"request {name!r}: computed_tokens: this executor takes in no KV from elsewhere")
        self._move_blocks(batch)
        rows = batch.rows
        if not rows:
            return StepResult(token_ids=[])
        hidden_TH, ends = self._forward(self._model, rows)
        token_ids = [-1] * len(rows)
        logprobs: dict[int, TokenLogprobs] = {}
        drawing = [index for index, row in enumerate(rows) if row.draws]
        if drawing:
            drawn_hidden = (
                hidden_TH if len(drawing) == len(hidden_TH) else hidden_TH[self._to_device(ends[drawing] - 1)]
            )
            logits_SV = self._model.compute_logits(drawn_hidden)
            sampled = sample(logits_SV, [rows[index].request for index in drawing])
            for index, token_id in zip(drawing, sampled.token_ids, strict=True):
                token_ids[index] = token_id
            logprobs = {drawing[at]: entry for at, entry in sampled.logprobs.items()}
        return StepResult(token_ids, logprobs, self._prompt_logprobs(self._model, rows, hidden_TH, ends))

    def shutdown(self) -> None:
        """Give model and caches back; further calls of execute raise RuntimeError."""
        self._model = None
        self.kv_cache = self.kv_cache.new_empty(0)
        self.host_cache = self.host_cache.new_empty(0)

    def _move_blocks(self, batch: Batch) -> None:
        """Swaps out, then in, then copies on write: a block that leaves may be filled anew in the same step."""
        if batch.swap_out:
            kernels.swap_blocks(self.kv_cache, self.host_cache, torch.tensor(batch.swap_out, dtype=torch.int64))
        if batch.swap_in:
            kernels.swap_blocks(self.host_cache, self.kv_cache, torch.tensor(batch.swap_in, dtype=torch.int64))
        if batch.copies:
            kernels.copy_blocks(self.kv_cache, torch.tensor(batch.copies, dtype=torch.int64))

    def _forward(self, model: Decoder, rows: Sequence[ScheduledRequest]) -> tuple[torch.Tensor, np.ndarray]:
        """Hidden states [T, H] of the step's tokens, and where each row's tokens end, int64 [R]."""
        size, num_rows = self._block_size, len(rows)
        where = self._tables.update(rows)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        ends = counts.cumsum()
        longest = int(counts.max())
        if longest == 1:
            token_ids = np.array([row.request.token_ids[row.start] for row in rows], dtype=np.int64)
            positions, owners = starts, where
        else:
            chunks = (row.request.token_ids[row.start : row.start + row.num_tokens] for row in rows)
            token_ids = np.fromiter(chain.from_iterable(chunks), dtype=np.int64, count=int(ends[-1]))
            positions = np.arange(ends[-1]) + np.repeat(starts + counts - ends, counts)
            owners = np.repeat(where, counts)
        slots = self._tables.blocks_at(owners, positions // size).astype(np.int64) * size + positions % size
        query_start_loc = np.zeros(num_rows + 1, dtype=np.int32)
        query_start_loc[1:] = ends
        seq_lens = (starts + counts).astype(np.int32)
        max_seq_len = int(seq_lens.max())
        attention = AttentionMetadata(
            kv_cache=self.kv_cache,
            slot_mapping=self._to_device(slots),
            block_tables=self._to_device(self._tables.take(where, -(-max_seq_len // size))),
            query_start_loc=self._to_device(query_start_loc),
            seq_lens=self._to_device(seq_lens),
            max_query_len=longest,
            max_seq_len=max_seq_len,
        )
        return model.forward(self._to_device(token_ids), self._to_device(positions), attention), ends

    def _prompt_logprobs(
        self, model: Decoder, rows: Sequence[ScheduledRequest], hidden_TH: torch.Tensor, ends: np.ndarray
    ) -> Mapping[int, Sequence[TokenLogprobs]]:
        """For rows that ask: entries of prompt tokens start + 1 ..., as far as the row's logits predict such."""
        entries: dict[int, list[TokenLogprobs]] = {}
        for index, row in enumerate(rows):
            wanted = row.request.sampling.prompt_logprobs
            if wanted is None:
                continue
            last = min(row.start + row.num_tokens, row.request.num_prompt_tokens - 1)
            targets = row.request.token_ids[row.start + 1 : last + 1]
            first_row = int(ends[index]) - row.num_tokens
            entries[index] = []
            for at in range(0, len(targets), _PROMPT_LOGITS_AT_ONCE):
                piece = targets[at : at + _PROMPT_LOGITS_AT_ONCE]
                logits = model.compute_logits(hidden_TH[first_row + at : first_row + at + len(piece)])
                entries[index] += token_logprobs(logits, piece, [wanted] * len(piece))
        return entries

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)
