"""Step time from a model's shape and a GPU sheet alone: the larger of arithmetic and memory traffic, kernel by kernel.

Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures",
CACM 2009. With T tokens in the step, H hidden size, I intermediate size, L layers, e bytes an element:

    linear K -> N     max(2 T K N / flops, e (K N + T K + T N) / bandwidth) / efficiency(T)     4 a layer, and the head
    decode attention  max(4 Hq D kv / flops, 2 e Hkv D kv / bandwidth), kv summed over the rows of one token
    prefill           4 Hq D pairs / flops, pairs = c (k + (c + 1) / 2) for c tokens after k computed ones, causal
    element-wise      bytes / bandwidth
    swapped block     bytes / host link, and 2 L copies' fixed time
    fixed             9 kernels a layer and 4 more, each kernel_seconds; the host's a + b rows

With N GPUs (Shoeybi et al., "Megatron-LM", 2019) heads, intermediate size and vocabulary are divided by N, norms not;
two all-reduces of [T, H] a layer and one for the embedding, each link_seconds + 2 (N - 1) / N T H e / link_bandwidth
(ring; Patarasuk and Yuan, JPDC 2009), and one gathering of the logits.
"""

from __future__ import annotations

import math
from typing import Protocol

from research_engine.engine.contract import Batch

from .cost_model import StepTime, Work, work_of
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


def part_of_one_gpu(model: ModelShape, tensor_parallel: int) -> tuple[int, int, int]:
    """Widths of the queries, of the keys, and of the intermediate layer on each of `tensor_parallel` GPUs.

    KV heads that are fewer than the GPUs are held by several of them.

    Raises:
        ValueError: the model cannot be divided so; names the number and the rule.
    """
    if tensor_parallel < 1:
        raise ValueError(f"tensor_parallel = {tensor_parallel}: must be an integer >= 1")
    for name in ("num_heads", "intermediate_size"):
        if getattr(model, name) % tensor_parallel:
            rule = f"must divide the model's {name}, {getattr(model, name)}"
            raise ValueError(f"tensor_parallel = {tensor_parallel}: {rule}")
    kv_heads = model.num_kv_heads
    if kv_heads % tensor_parallel and tensor_parallel % kv_heads:
        rule = f"the model's num_kv_heads, {kv_heads}, must divide it or be divisible by it"
        raise ValueError(f"tensor_parallel = {tensor_parallel}: {rule}")
    query, kv = model.num_heads // tensor_parallel, max(1, kv_heads // tensor_parallel)
    return query * model.head_dim, kv * model.head_dim, model.intermediate_size // tensor_parallel


class RooflineCost:
    """A CostModel for a dense decoder of the Llama family on one GPU, or on several of one host.

    Args:
        model: its shape.
        gpu: the sheet.
        block_size: token slots per KV block, for block moves.
        bytes_per_element: of weights, activations and KV cache.
        tensor_parallel: GPUs that every layer is divided over.

    Raises:
        ValueError: heads or intermediate size cannot be divided by tensor_parallel.
    """

    def __init__(
        self,
        model: ModelShape,
        gpu: GpuSheet,
        *,
        block_size: int = 16,
        bytes_per_element: int = 2,
        tensor_parallel: int = 1,
    ) -> None:
        self.model = model
        self.gpu = gpu
        self._element = bytes_per_element
        self.num_gpus = tensor_parallel
        query, kv, inner = part_of_one_gpu(model, tensor_parallel)
        hidden = model.hidden_size
        self._linears = ((hidden, query + 2 * kv), (query, hidden), (hidden, 2 * inner), (inner, hidden))
        # two norms read and write x and the residual; rotary embedding and cache write; activation; attention in, out
        self._elements_per_token = 8 * hidden + 2 * (query + 2 * kv) + 3 * inner + 2 * query
        self._stream = gpu.memory_bandwidth * gpu.memory_efficiency
        self._kv_bytes = 2 * kv * bytes_per_element * model.num_layers
        self._block_bytes = self._kv_bytes * block_size
        self._block_move = self._block_bytes / gpu.host_link_bandwidth + 2 * model.num_layers * gpu.host_copy_seconds
        self._attention_flops = 4 * query * model.num_layers
        self._fixed = gpu.kernel_seconds * (KERNELS_PER_LAYER * model.num_layers + KERNELS_BESIDE) + gpu.host_seconds
        self._dense: dict[int, float] = {}  # tokens -> seconds; a run meets few different numbers
        self._head: dict[int, float] = {}

    def seconds(self, batch: Batch) -> float:
        return self.price(work_of(batch))

    def step_time(self, batch: Batch) -> StepTime:
        """The sheet's host time passes before the device begins."""
        host = self.gpu.host_seconds + self.gpu.host_seconds_per_sequence * len(batch.rows)
        return StepTime(host, 0.0, max(0.0, self.seconds(batch) - host), 0.0)

    def price(self, work: Work) -> float:
        """Seconds of a step with these features."""
        return (
            self._fixed
            + self.gpu.host_seconds_per_sequence * work.sequences
            + self.dense(work.tokens)
            + self.head(work.draws)
            + self.attention(work)
            + work.blocks_moved * self._block_move
            + work.blocks_copied * 2 * self._block_bytes / self._stream
        )

    def dense(self, tokens: int) -> float:
        """Linear layers, element-wise work and all-reduces of all layers; 0 for no tokens."""
        known = self._dense.get(tokens)
        if known is None:
            layer = sum(self.linear(tokens, inputs, outputs) for inputs, outputs in self._linears)
            layer += tokens * self._elements_per_token * self._element / self._stream
            shared = (2 * self.model.num_layers + 1) * self.all_reduce(tokens * self.model.hidden_size * self._element)
            known = self._dense[tokens] = self.model.num_layers * layer + shared if tokens else 0.0
        return known

    def head(self, rows: int) -> float:
        """Logits of `rows` tokens; 0 for none."""
        known = self._head.get(rows)
        if known is None:
            own = -(-self.model.vocab_size // self.num_gpus)
            known = self.linear(rows, self.model.hidden_size, own) if rows else 0.0
            if rows and self.num_gpus > 1:  # every GPU sends its part once
                gathered = rows * own * (self.num_gpus - 1) * self._element
                known += self.gpu.gpu_link_seconds + gathered / self.gpu.gpu_link_bandwidth
            self._head[rows] = known
        return known

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds until every GPU has the sum of all GPUs' `num_bytes`; 0 on one GPU."""
        if self.num_gpus == 1:
            return 0.0
        sent = 2 * (self.num_gpus - 1) / self.num_gpus * num_bytes
        return self.gpu.gpu_link_seconds + sent / self.gpu.gpu_link_bandwidth

    def linear(self, rows: int, inputs: int, outputs: int) -> float:
        """One matrix product [rows, inputs] x [inputs, outputs]; never less than one of fewer rows.

        Where the efficiency rises faster than the work, time would fall at first. Between two points of the sheet it
        falls only from the first of them on, so it is enough to look at those.
        """
        points = (at for at, _ in self.gpu.gemm_efficiency if at < rows)
        return max(self._product(at, inputs, outputs) for at in (*points, rows))

    def _product(self, rows: float, inputs: int, outputs: int) -> float:
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

    def _efficiency(self, rows: float) -> float:
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
