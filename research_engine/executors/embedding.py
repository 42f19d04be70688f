"""Computes embeddings: an executor whose requests are texts, without a KV cache.

A text is one forward, in the step that holds its last tokens; a policy that hands a prompt out in chunks says when a
text is computed, not how. The texts of a step lie back to back, without padding:

    token_ids   a0 a1 a2 | b0 b1 b2 b3 b4      int64 [T]
    positions    0  1  2 |  0  1  2  3  4
    keys, values of one layer in throw-away blocks that all layers share, since no step reads what another wrote

The engine's books see a text as one block; nothing stands behind that block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from research_engine.engine.contract import Batch, Pending, Request, StepResult
from research_engine.executors.torch_executor import Decoder
from research_engine.layers.pooling import normalized, pool
from research_engine.layers.token_heads import TokenHeads
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.pooling import Pooling

BLOCK_SIZE = 16
EXTRAS = ("lexical", "multi")
"""What a text may want beside its dense vector."""


@dataclass(frozen=True)
class Vectors:
    """What a text became.

    Attributes:
        dense: float32 [H].
        lexical: float32 [T], a weight for every token; multi: float32 [T, M], a vector for every token. None where they
            were not asked for.
    """

    dense: NDArray[np.float32]
    lexical: NDArray[np.float32] | None = None
    multi: NDArray[np.float32] | None = None


class EmbeddingExecutor:
    """An `engine.contract.Executor` that draws no tokens: every text ends with one token 0, which means nothing.

    Args:
        model: with its weights loaded.
        pooling: from hidden states to vectors.
        heads: what makes token weights and token vectors, of a model that has it.
    """

    def __init__(self, model: Decoder, pooling: Pooling, heads: TokenHeads | None = None) -> None:
        self.pooling, self.heads, self.device = pooling, heads, model.device
        self._model: Decoder | None = model
        self._cache = torch.empty(0, dtype=model.dtype, device=model.device)
        self._wanted: dict[str, Collection[str]] = {}
        self._done: dict[str, Vectors] = {}

    def expect(self, request_id: str, extras: Collection[str] = ()) -> None:
        """Keep what becomes of a request until `take` is called for it.

        Args:
            extras: which of EXTRAS it wants beside its dense vector.
        """
        assert not extras or self.heads is not None
        self._wanted[request_id] = extras

    def take(self, request_id: str) -> Vectors | None:
        """The vectors of a text, once; None where there are none. From here on they are not kept."""
        self._wanted.pop(request_id, None)
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
        hidden_TH = self._model.forward(token_ids, positions, attention)
        dense = pool(hidden_TH, starts, self.pooling.kind)
        if self.pooling.normalize:
            dense = normalized(dense)
        asked = {extra for text in texts for extra in self._wanted.get(text.id, ())}
        made: dict[str, torch.Tensor] = {}
        if self.heads is not None and "lexical" in asked:
            made["lexical"] = self.heads.lexical(hidden_TH)
        if self.heads is not None and "multi" in asked:
            made["multi"] = self.heads.multi_vector(hidden_TH)
        return _Step(self, result, [(text.id, text.num_prompt_tokens) for text in texts], {"dense": dense, **made})

    def keep(self, request_id: str, dense: NDArray[np.float32], extras: Mapping[str, NDArray[np.float32]]) -> None:
        """Mutates: a text that is done and expected waits for `take`."""
        if request_id in self._wanted:  # copies, so that one text doesn't hold a whole step's memory
            wanted = {name: extras[name].copy() for name in self._wanted[request_id]}
            self._done[request_id] = Vectors(dense.copy(), **wanted)

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

        parts = [np.concatenate(prompts), positions, starts, slots, tables.ravel(), lengths]
        token_ids, sent_positions, sent_starts, sent_slots, sent_tables, seq_lens = self._sent(parts)
        attention = AttentionMetadata(
            kv_cache=self._throw_away(model, int(first_block[-1])),
            slot_mapping=sent_slots,
            block_tables=sent_tables.to(torch.int32).view(tables.shape),
            query_start_loc=sent_starts.to(torch.int32),
            seq_lens=seq_lens.to(torch.int32),
            max_query_len=longest,
            max_seq_len=longest,
        )
        return token_ids, sent_positions, sent_starts, attention

    def _sent(self, parts: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
        """Arrays on the device, int64 and flat, by one copy that is not waited for."""
        flat = torch.from_numpy(np.concatenate(parts))
        if self.device.type == "cuda":  # pinned memory is not reused before the copy has ended
            flat = flat.pin_memory().to(self.device, non_blocking=True)
        return list(flat.split([part.size for part in parts]))

    def _throw_away(self, model: Decoder, num_blocks: int) -> torch.Tensor:
        """``[L, 2, N, Hkv, B, D]`` of which all layers are the same memory. Mutates: it grows with the largest step."""
        config = model.config
        tile = (config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        if self._cache.numel() < 2 * num_blocks * int(np.prod(tile)):
            self._cache = torch.empty((2, num_blocks, *tile), dtype=model.dtype, device=self.device)
        blocks = self._cache.view(2, -1, *tile)
        return blocks.expand(config.num_layers, *blocks.shape)


class _Step:
    """A launched step whose results, rows of a text each or of a token, are on their way."""

    def __init__(
        self,
        executor: EmbeddingExecutor,
        result: StepResult,
        texts: Sequence[tuple[str, int]],
        made: Mapping[str, torch.Tensor],
    ) -> None:
        self._executor, self._result, self._texts = executor, result, texts
        self._event: torch.cuda.Event | None = None
        if executor.device.type == "cuda":  # copied now, before the kernels of a next step stand in front of the copy
            self._made = {name: _begin_copy(rows) for name, rows in made.items()}
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._made = dict(made)

    def wait(self) -> StepResult:
        """The tokens, which mean nothing; hands the vectors to the executor."""
        if self._event is not None:
            self._event.synchronize()
        extras = {name: rows.numpy() for name, rows in self._made.items()}
        dense, start = extras.pop("dense"), 0
        for (name, length), vector in zip(self._texts, dense, strict=True):
            self._executor.keep(name, vector, {kind: rows[start : start + length] for kind, rows in extras.items()})
            start += length
        return self._result


def _begin_copy(rows: torch.Tensor) -> torch.Tensor:
    """Pinned memory that a device's tensor is being copied to."""
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    return host.copy_(rows, non_blocking=True)
