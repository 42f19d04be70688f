"""Computes batches with torch and the project's kernels, on a CPU or on one CUDA device, without waiting for it.

A step is one forward over the tokens of all rows, back to back without padding:

    rows            A: 3 tokens from 5        B: 1 token from 40      (prefill and decode alike)
    token_ids       a5  a6  a7                b40                     int64 [T]
    positions        5   6   7                 40                     int64 [T]
    slot_mapping    table[A][5 // B] * B + 5 % B ...                  int64 [T]
    query_start_loc  0                          3              4      int32 [R + 1]
    seq_lens         8                         41                     int32 [R]
    logits of       a7 (if it is A's last token), b40                 float32 [S, V]

What stays the same from step to step stays on the device (device_batch.py): a step is one copy there, a forward, a
draw, and one copy back. A token that the step before draws never makes the round trip. On a GPU a step of decoding
rows alone is a CUDA graph, one for each size of a ladder (step_graphs.py), and so are steps with prompts of so few
tokens that launching them takes longer than computing them; padding rows and tokens read and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from research_engine import kernels
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch, Pending, ScheduledRequest, StepResult, TokenLogprobs
from research_engine.executors.device_batch import DeviceBatch, Drawing
from research_engine.executors.kv_scales import kv_scales
from research_engine.executors.logprobs import prompt_logprobs
from research_engine.executors.memory_plan import MemoryPlan
from research_engine.executors.sampler import Draw, Draws, Sampler
from research_engine.executors.seats import SeatChanges
from research_engine.executors.staging import Arrival
from research_engine.executors.step_graphs import StepGraphs
from research_engine.models.attention_metadata import AttentionMetadata
from research_engine.models.config import ModelConfig


class Decoder(Protocol):
    """What the executor needs of a model."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    kv_scales: torch.Tensor | None

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden_SH: torch.Tensor) -> torch.Tensor: ...


class TorchExecutor:
    """Owns the model, its KV cache, the host blocks for swapping, and the running batch's state on the device.

    Args:
        model: with its weights loaded; its device and dtype are the cache's.
        config: sizes of the cache and limits of a batch.
        cache_dtype: of the KV cache: the model's when None, float8_e4m3fn or int8.
        graph_sizes: decode batches to run as CUDA graphs; none launches every step kernel by kernel.
        token_sizes: other steps to run as CUDA graphs, by their tokens; larger ones are launched kernel by kernel.

    Attributes:
        kv_cache: [L, 2, num_blocks, Hkv, block_size, D] in cache_dtype.
        host_cache: [L, 2, num_host_blocks, Hkv, block_size, D], pinned when the model is on a GPU.
        memory_plan: what the device's memory was divided by; None where the cache's size was given.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        cache_dtype: torch.dtype | None = None,
        graph_sizes: Sequence[int] = (),
        token_sizes: Sequence[int] = (),
        memory_plan: MemoryPlan | None = None,
    ) -> None:
        self.memory_plan = memory_plan
        shape, device, dtype = model.config, model.device, cache_dtype or model.dtype
        self.device = device
        self._model: Decoder | None = model
        tile = (shape.num_kv_heads, config.block_size, shape.head_dim)
        # never initialised: a slot is read only after it was written, and untouched pages cost no memory on a CPU
        self.kv_cache = torch.empty((shape.num_layers, 2, config.num_blocks, *tile), dtype=dtype, device=device)
        self.host_cache = torch.empty(
            (shape.num_layers, 2, config.num_host_blocks, *tile), dtype=dtype, pin_memory=device.type == "cuda"
        )
        most_tokens = max(config.max_num_seqs, 0, *token_sizes)
        query = torch.empty((most_tokens, shape.num_heads, shape.head_dim), dtype=model.dtype, device=device)
        self._batch = DeviceBatch(self.kv_cache, kv_scales(model, dtype), config, query)
        self._sampler = Sampler(config.max_num_seqs, shape.vocab_size, device)
        self._graphs = StepGraphs(self._decode, graph_sizes, device)
        self._token_graphs = StepGraphs(self._padded, token_sizes, device)
        self._most_padded = max(token_sizes, default=0)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the graphs, of which each would otherwise be captured at its first use, and drop those that are slow.

        Args:
            progress: called with (captured, all) after each.
        """
        count = len(self._graphs.sizes) + len(self._token_graphs.sizes)
        tell = progress or (lambda done, count: None)
        with torch.inference_mode():
            self._graphs.capture_all(lambda done, _: tell(done, count))
            self._token_graphs.capture_all(lambda done, _: tell(len(self._graphs.sizes) + done, count))
            for graphs in (self._graphs, self._token_graphs):
                graphs.drop_slow()

    @property
    def graph_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows of the graphs of decoding steps, and tokens of those of other steps; none off a GPU."""
        return tuple(self._graphs.sizes), tuple(self._token_graphs.sizes)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Pending:
        """Launch a batch: move blocks, compute the rows, draw tokens. Changes no request.

        Raises (here or in `wait`):
            ValueError: the model's logits are no numbers or leave nothing to draw, or KV comes with a request; names
                the request.
            RuntimeError: the device failed, or the executor was shut down.
        """
        if self._model is None:
            raise RuntimeError("the executor was shut down")
        if batch.received:
            name = batch.received[0][0].id
            raise ValueError(f"request {name!r}: computed_tokens: this executor takes in no KV from elsewhere")
        self._move_blocks(batch)
        if not batch.rows:
            return StepResult(token_ids=[])
        changes = self._batch.seat(batch.rows)
        self._sampler.sit_down(changes.newcomers)
        rows, num_tokens = batch.rows, batch.num_tokens
        if num_tokens == len(rows) and all(row[3] for row in rows):
            padded = self._graphs.padded(len(rows))
            drawing = self._batch.send_decode(rows, changes, padded)
            return self._draw(rows, drawing, self._graphs.run(padded), {})
        if num_tokens <= self._most_padded and all(row[0].sampling.prompt_logprobs is None for row in rows):
            padded = self._token_graphs.padded(num_tokens)
            drawing = self._batch.send_padded(rows, changes, padded)
            return self._draw(rows, drawing, self._token_graphs.run(padded), {})
        return self._run_mixed(self._model, rows, changes)

    def shutdown(self) -> None:
        """Give model and caches back; further calls of execute raise RuntimeError."""
        self._model = None
        self._graphs = StepGraphs(self._decode, (), self.device)
        self._token_graphs = StepGraphs(self._padded, (), self.device)
        self._batch.shutdown()
        self.kv_cache = self.kv_cache.new_empty(0)
        self.host_cache = self.host_cache.new_empty(0)

    def _decode(self, padded: int) -> Draws:
        """A step of P rows of one token each, from what lies on the device."""
        assert self._model is not None
        inputs = self._batch.decode_inputs(padded)
        hidden_PH = self._model.forward(inputs.token_ids, inputs.positions, inputs.attention)
        return self._sampler.draws(self._model.compute_logits(hidden_PH), inputs.seats, inputs.num_tokens)

    def _padded(self, padded: int) -> Draws:
        """A step of T tokens of any rows, padding included, from what lies on the device."""
        assert self._model is not None
        inputs = self._batch.padded_inputs(padded)
        hidden_TH = self._model.forward(inputs.token_ids, inputs.positions, inputs.attention)
        logits_SV = self._model.compute_logits(hidden_TH[inputs.hidden_rows])
        return self._sampler.draws(logits_SV, inputs.seats, inputs.num_tokens)

    def _run_mixed(self, model: Decoder, rows: Sequence[ScheduledRequest], changes: SeatChanges) -> Pending:
        drawing, inputs = self._batch.send_mixed(rows, changes)
        hidden_TH = model.forward(inputs.token_ids, inputs.positions, inputs.attention)
        prompts = prompt_logprobs(model.compute_logits, rows, hidden_TH)
        if not drawing.rows:
            return StepResult([-1] * len(rows), prompt_logprobs=prompts)
        logits_SV = model.compute_logits(hidden_TH[inputs.hidden_rows])
        return self._draw(rows, drawing, self._sampler.draws(logits_SV, inputs.seats, inputs.num_tokens), prompts)

    def _draw(
        self,
        rows: Sequence[ScheduledRequest],
        drawing: Drawing,
        draws: Draws,
        prompts: Mapping[int, Sequence[TokenLogprobs]],
    ) -> Pending:
        """Draw the tokens, keep them for the next step, and send them home."""
        if not drawing.rows:
            return StepResult([-1] * len(rows))
        draws = draws.first(len(drawing.rows))
        drawn = rows if len(drawing.rows) == len(rows) else [rows[index] for index in drawing.rows]
        draw = self._sampler.draw(draws, drawn, drawing.sitting)
        token_ids = draw.sampled.token_ids
        self._batch.store(token_ids, draws.seats)
        return _Step(len(rows), drawing.rows, draw, self._batch.staging.fetch(token_ids), prompts)

    def _move_blocks(self, batch: Batch) -> None:
        """Swaps out, then in, then copies on write: a block that leaves may be filled anew in the same step."""
        if batch.swap_out:
            kernels.swap_blocks(self.kv_cache, self.host_cache, torch.tensor(batch.swap_out, dtype=torch.int64))
        if batch.swap_in:
            kernels.swap_blocks(self.host_cache, self.kv_cache, torch.tensor(batch.swap_in, dtype=torch.int64))
        if batch.copies:
            kernels.copy_blocks(self.kv_cache, torch.tensor(batch.copies, dtype=torch.int64))


class _Step:
    """A launched step whose tokens are on their way."""

    def __init__(
        self,
        num_rows: int,
        drawing: Sequence[int],
        draw: Draw,
        arrival: Arrival,
        prompts: Mapping[int, Sequence[TokenLogprobs]],
    ) -> None:
        self._num_rows, self._drawing, self._draw = num_rows, drawing, draw
        self._arrival, self._prompts = arrival, prompts

    def wait(self) -> StepResult:
        """Raises ValueError: a row's logits are no numbers or leave nothing to draw; names the request."""
        drawn = self._arrival.wait()
        if min(drawn) < 0:
            self._draw.check(drawn)
        entries = self._draw.logprobs(drawn)
        if len(drawn) == self._num_rows:
            return StepResult(drawn, entries, self._prompts)
        token_ids = [-1] * self._num_rows
        for index, token_id in zip(self._drawing, drawn, strict=True):
            token_ids[index] = token_id
        return StepResult(token_ids, {self._drawing[at]: entry for at, entry in entries.items()}, self._prompts)
