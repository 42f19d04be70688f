"""Puts a simulated engine together: the same Engine and scheduler, on a virtual clock and a cost model."""

from __future__ import annotations

from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Scheduler
from research_engine.engine.engine import Engine
from research_engine.engine.records import Records
from research_engine.executors.simulated import SimulatedExecutor

from .clock import VirtualClock
from .cost_model import CostModel
from .gpu_sheet import GpuSheet
from .roofline import ModelShape


def simulated_engine(
    config: EngineConfig,
    scheduler: Scheduler,
    cost_model: CostModel,
    *,
    clock: VirtualClock | None = None,
    records: Records | None = None,
) -> Engine:
    """An engine in virtual time; `engine.clock` is its clock.

    Args:
        config, scheduler, records: as `Engine` takes them.
        cost_model: prices the steps.
        clock: a new one at 0 when None.
    """
    clock = VirtualClock() if clock is None else clock
    return Engine(config, scheduler, SimulatedExecutor(cost_model, clock), clock=clock, records=records)


def kv_blocks_of(
    model: ModelShape,
    gpu: GpuSheet,
    *,
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.9,
    bytes_per_element: int = 2,
) -> int:
    """KV blocks that a GPU holds beside the weights and one step's activations; an estimate, as a real start makes one.

    Raises:
        ValueError: no block fits; with the numbers.
    """
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    layer = model.hidden_size * (2 * query + 2 * kv) + 3 * model.hidden_size * model.intermediate_size
    weights = bytes_per_element * (model.num_layers * layer + 2 * model.vocab_size * model.hidden_size)
    per_token = 4 * model.hidden_size + 2 * (query + kv) + 3 * model.intermediate_size
    activations = per_token * bytes_per_element * max_num_batched_tokens + 12 * model.vocab_size * max_num_seqs
    room = gpu.memory_gib * 2**30 * gpu_memory_utilization - weights - activations
    block = 2 * kv * model.num_layers * bytes_per_element * block_size
    if room < block:
        raise ValueError(
            f"{gpu.name}: {gpu_memory_utilization:.0%} of {gpu.memory_gib} GiB hold weights of "
            f"{weights / 2**30:.1f} GiB and activations of {activations / 2**30:.1f} GiB, "
            f"but no KV block of {block / 2**20:.1f} MiB beside them"
        )
    return int(room // block)
