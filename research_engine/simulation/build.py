"""Puts a simulated engine together: the same Engine and scheduler, on a virtual clock and a cost model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from research_engine import __version__
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Scheduler
from research_engine.engine.engine import Engine
from research_engine.engine.records import Records
from research_engine.executors.simulated import SimulatedExecutor

from .clock import VirtualClock
from .cost_model import CostModel
from .gpu_sheet import GpuSheet
from .profiled import Profile, ProfiledCost
from .roofline import ModelShape, RooflineCost, part_of_one_gpu

PROFILES = Path(__file__).with_name("profiles")


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


def cost_model_of(
    name: str,
    *,
    model_name: str,
    model: ModelShape,
    gpu: GpuSheet | None,
    dtype: str = "auto",
    block_size: int = 16,
    tensor_parallel: int = 1,
    force: bool = False,
) -> CostModel:
    """A cost model by name: "roofline", which needs a sheet, or "profiled:FILE", or "profiled:" and one that ships.

    Args:
        model_name, gpu, dtype: a profile of another model, GPU (where a sheet is given), dtype (unless "auto", which
            is bfloat16 for the roofline) or version of this project (where it records one) is refused, unless `force`.

    Raises:
        ProfileMismatch: with every difference.
        ValueError: an unknown name, no sheet, a corrupt file, or tensor_parallel where it cannot be had.
        OSError: a file cannot be read.
    """
    kind, _, file = name.partition(":")
    if kind == "roofline" and not file:
        if gpu is None:
            raise ValueError("cost_model = 'roofline' needs a GPU sheet")
        return RooflineCost(
            model,
            gpu,
            block_size=block_size,
            bytes_per_element=bytes_per_element(dtype),
            tensor_parallel=tensor_parallel,
        )
    if kind != "profiled" or not file:
        raise ValueError(f"cost_model = {name!r}: must be roofline or profiled:FILE")
    profile = Profile.load(profile_path(file))
    if not force:
        wanted = {"tensor_parallel": str(tensor_parallel)}
        wanted |= {} if gpu is None else {"gpu": gpu.name}
        wanted |= {} if dtype == "auto" else {"dtype": dtype}
        wanted |= {"research_engine": __version__} if "research_engine" in profile.machine else {}
        one = replace(profile, machine={"tensor_parallel": "1", **profile.machine})
        one.require(model=model_name, **wanted)
    return ProfiledCost(profile)


def profile_path(file: str) -> Path:
    """The file of that name, or, where there is none, the profile of that name that ships (simulation/profiles)."""
    path, shipped = Path(file).expanduser(), PROFILES / f"{file}.json"
    return shipped if not path.exists() and Path(file).name == file and shipped.exists() else path


def bytes_per_element(dtype: str) -> int:
    """Of weights, activations and KV cache; "auto" is bfloat16."""
    return 4 if dtype == "float32" else 2


def kv_blocks_of(
    model: ModelShape,
    gpu: GpuSheet,
    *,
    block_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    gpu_memory_utilization: float = 0.9,
    bytes_per_element: int = 2,
    tensor_parallel: int = 1,
) -> int:
    """KV blocks that a GPU holds beside the weights and one step's activations; an estimate, as a real start makes one.

    With tensor_parallel GPUs a block is spread over all of them, so their number is that of each.

    Raises:
        ValueError: no block fits, or the model cannot be divided so; with the numbers.
    """
    query, kv, inner = part_of_one_gpu(model, tensor_parallel)
    layer = model.hidden_size * (2 * query + 2 * kv) + 3 * model.hidden_size * inner
    embeddings = 2 * model.vocab_size * model.hidden_size // tensor_parallel
    weights = bytes_per_element * (model.num_layers * layer + embeddings)
    per_token = 4 * model.hidden_size + 2 * (query + kv) + 3 * inner
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
