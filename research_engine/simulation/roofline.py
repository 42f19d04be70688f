"""Step time from a model's shape and a GPU sheet alone: the larger of arithmetic and memory traffic, kernel by kernel.

Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
CACM 2009. With T tokens in the step, H hidden size, I intermediate size, L layers, e bytes an element:

    linear K -> N     max(2 T K N / flops, e (K N + T K + T N) / bandwidth) / efficiency(T)     4 a layer, and the head
    decode attention  max(4 Hq D kv / flops, 2 e Hkv D kv / bandwidth), kv summed over the rows of one token
    prefill           4 Hq D pairs / flops, pairs = c (k + (c + 1) / 2) for c tokens after k computed ones, causal
    element-wise      bytes / bandwidth
    fixed             9 kernels a layer and 4 more, each kernel_seconds; the host's a + b rows
"""

from __future__ import annotations

import math
from typing import Protocol

from research_engine.engine.contract import Batch

from .cost_model import Work, work_of
from .gpu_sheet import GpuSheet

KERNELS_PER_LAYER = 9  # 2 norms, 4 linears, rotary embedding with cache write, attention, activation
KERNELS_BESIDE = 4  # embedding, last norm, head, sampling


class ModelShape(Protocol):
    """What of a ModelConfig is read; any object with these numbers will do."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class RooflineCost:
    """A CostModel for a dense decoder of the Llama family on one GPU.

    Args:
        model: its shape.
        gpu: the sheet.
        block_size: token slots per KV block, for block moves.
        bytes_per_element: of weights, activations and KV cache.
    """

    def __init__(self, model: ModelShape, gpu: GpuSheet, *, block_size: int = 16, bytes_per_element: int = 2) -> None:
        self.model = model
        self.gpu = gpu
        self._element = bytes_per_element
        query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        hidden, inner = model.hidden_size, model.intermediate_size
        self._linears = ((hidden, query + 2 * kv), (query, hidden), (hidden, 2 * inner), (inner, hidden))
        # two norms read and write x and the residual; rotary embedding and cache write; activation; attention in, out
        self._elements_per_token = 8 * hidden + 2 * (query + 2 * kv) + 3 * inner + 2 * query
        self._stream = gpu.memory_bandwidth * gpu.memory_efficiency
        self._kv_bytes = 2 * kv * bytes_per_element * model.num_layers
        self._block_bytes = self._kv_bytes * block_size
        self._attention_flops = 4 * query * model.num_layers
        self._fixed = gpu.kernel_seconds * (KERNELS_PER_LAYER * model.num_layers + KERNELS_BESIDE) + gpu.host_seconds
        self._dense: dict[int, float] = {}  # tokens -> seconds; a run meets few different numbers
        self._head: dict[int, float] = {}

    def seconds(self, batch: Batch) -> float:
        return self.price(work_of(batch))

    def price(self, work: Work) -> float:
        """Seconds of a step with these features."""
        return (
            self._fixed
            + self.gpu.host_seconds_per_sequence * work.sequences
            + self.dense(work.tokens)
            + self.head(work.draws)
            + self.attention(work)
            + work.blocks_moved * self._block_bytes / self.gpu.host_link_bandwidth
            + work.blocks_copied * 2 * self._block_bytes / self._stream
        )

    def dense(self, tokens: int) -> float:
        """Linear layers and element-wise work of all layers; 0 for no tokens."""
        known = self._dense.get(tokens)
        if known is None:
            layer = sum(self.linear(tokens, inputs, outputs) for inputs, outputs in self._linears)
            layer += tokens * self._elements_per_token * self._element / self._stream
            known = self._dense[tokens] = self.model.num_layers * layer if tokens else 0.0
        return known

    def head(self, rows: int) -> float:
        """Logits of `rows` tokens; 0 for none."""
        known = self._head.get(rows)
        if known is None:
            known = self.linear(rows, self.model.hidden_size, self.model.vocab_size) if rows else 0.0
            self._head[rows] = known
        return known

    def linear(self, rows: int, inputs: int, outputs: int) -> float:
        """One matrix product [rows, inputs] x [inputs, outputs]."""
        gpu = self.gpu
        moved = self._element * (inputs * outputs + rows * (inputs + outputs))
        return max(2 * rows * inputs * outputs / gpu.flops, moved / gpu.memory_bandwidth) / self._efficiency(rows)

    def attention(self, work: Work) -> float:
        """Attention of all layers over the rows of a step."""
        rate = self.gpu.flops * self.gpu.attention_efficiency
        seconds = work.decode_kv * max(self._attention_flops / rate, self._kv_bytes / self._stream)
        for tokens, before in work.prefills:
            pairs = tokens * (before + (tokens + 1) / 2)
            seconds += max(pairs * self._attention_flops / rate, (tokens + before) * self._kv_bytes / self._stream)
        return seconds

    def _efficiency(self, rows: int) -> float:
        points = self.gpu.gemm_efficiency
        below = points[0]
        for above in points:
            if above[0] >= rows:
                if above[0] == below[0]:
                    return above[1]
                share = math.log(rows / below[0]) / math.log(above[0] / below[0])
                return below[1] + share * (above[1] - below[1])
            below = above
        return below[1]
