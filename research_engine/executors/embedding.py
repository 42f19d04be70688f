"""Computes embeddings: an executor whose requests are texts, without a KV cache.

A text is one forward, in the step that holds its last tokens; a policy that hands a prompt out in chunks says when a
text is computed, not how. The texts of a step lie back to back, without padding:

    token_ids   a0 a1 a2 | b0 b1 b2 b3 b4      int64 [T]
    positions    0  1  2 |  0  1  2  3  4
    keys, values of one layer in throw-away blocks that all layers share, since no step reads what another wrote

The engine's books see a text as one block; nothing stands behind that block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from research_engine.engine.contract import Batch, Pending, Request, StepResult
from research_engine.executors.torch_executor import Decoder
from research_engine.layers.pooling import normalized, pool
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.pooling import Pooling

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Vectors:
    """What a text became.

    Attributes:
        dense: float32 [H].
    """

    dense: NDArray[np.float32]


class EmbeddingExecutor:
    """An `engine.contract.Executor` that draws no tokens: every text ends with one token 0, which means nothing.

    Args:
        model: with its weights loaded.
        pooling: from hidden states to vectors.
    """

    def __init__(self, model: Decoder, pooling: Pooling) -> None:
        self.pooling, self.device = pooling, model.device
        self._model: Decoder | None = model
        self._cache = torch.empty(0, dtype=model.dtype, device=model.device)
        self._wanted: set[str] = set()
        self._done: dict[str, Vectors] = {}

    def expect(self, request_id: str) -> None:
        """Keep what becomes of a request until `take` is called for it."""
        self._wanted.add(request_id)

    def take(self, request_id: str) -> Vectors | None:
        """The vectors of a text, once; None where there are none. From here on they are not kept."""
        self._wanted.discard(request_id)
        return self._done.pop(request_id, None)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Pending:
        """Launch a batch. Changes no request.

        Raises:
            RuntimeError: the device failed, or the executor was shut down.
        """
        if self._model is None:
            raise RuntimeError("the executor was shut down")
        result = StepResult([0 if row.draws else -1 for row in batch.rows])
        texts = [row.request for row in batch.rows if row.draws]
        if not texts:
            return result
        token_ids, positions, starts, attention = self._laid_out(self._model, texts)
        vectors = pool(self._model.forward(token_ids, positions, attention), starts, self.pooling.kind)
        if self.pooling.normalize:
            vectors = normalized(vectors)
        return _Step(self, result, [text.id for text in texts], vectors)

    def keep(self, vectors: Mapping[str, Vectors]) -> None:
        """Mutates: texts that are done and expected wait for `take`."""
        self._done |= {name: value for name, value in vectors.items() if name in self._wanted}

    def shutdown(self) -> None:
        """Give the model back; further calls of execute raise RuntimeError."""
        self._model = None
        self._cache = self._cache.new_empty(0)

    def _laid_out(
        self, model: Decoder, texts: Sequence[Request]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Token ids, positions, starts int64 ``[R + 1]``, and which throw-away blocks each text has."""
        prompts = [np.asarray(text.prompt_token_ids, dtype=np.int64) for text in texts]
        lengths = np.array([len(prompt) for prompt in prompts])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        num_blocks = -(-lengths // BLOCK_SIZE)
        first_block = np.concatenate([[0], np.cumsum(num_blocks)])
        slots = positions + np.repeat(first_block[:-1] * BLOCK_SIZE, lengths)
        tables = np.minimum(first_block[:-1, None] + np.arange(num_blocks.max()), first_block[-1] - 1)
        longest = int(lengths.max())

        def sent(values: NDArray[np.int64], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(values).to(dtype).to(self.device, non_blocking=True)

        sent_starts = sent(starts)
        attention = AttentionMetadata(
            kv_cache=self._throw_away(model, int(first_block[-1])),
            slot_mapping=sent(slots),
            block_tables=sent(tables, torch.int32),
            query_start_loc=sent_starts.to(torch.int32),
            seq_lens=sent(lengths, torch.int32),
            max_query_len=longest,
            max_seq_len=longest,
        )
        return sent(np.concatenate(prompts)), sent(positions), sent_starts, attention

    def _throw_away(self, model: Decoder, num_blocks: int) -> torch.Tensor:
        """``[L, 2, N, Hkv, B, D]`` of which all layers are the same memory. Mutates: it grows with the largest step."""
        config = model.config
        tile = (config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        if self._cache.numel() < 2 * num_blocks * int(np.prod(tile)):
            self._cache = torch.empty((2, num_blocks, *tile), dtype=model.dtype, device=self.device)
        blocks = self._cache.view(2, -1, *tile)
        return blocks.expand(config.num_layers, *blocks.shape)


class _Step:
    """A launched step whose vectors are on their way."""

    def __init__(
        self, executor: EmbeddingExecutor, result: StepResult, names: Sequence[str], vectors: torch.Tensor
    ) -> None:
        self._executor, self._result, self._names, self._vectors = executor, result, names, vectors

    def wait(self) -> StepResult:
        rows = self._vectors.cpu().numpy()
        self._executor.keep({name: Vectors(row) for name, row in zip(self._names, rows, strict=True)})
        return self._result
