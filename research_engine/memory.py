"""`research-engine memory MODEL`: from config.json alone, what a GPU's memory would go to and which lengths fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from research_engine.executors.memory_plan import GIB, MemoryPlan, plan_from_config

if TYPE_CHECKING:
    from research_engine.models.config import ModelConfig

_WEIGHT_DTYPES = ("bfloat16", "float16", "float32")
_KV_BYTES = {"auto": None, "bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "int8": 1}


@dataclass(frozen=True)
class MemoryOptions:
    """What to plan for.

    Args:
        model: a directory or file, hub id, alias or dummy:NAME; of a directory or hub id config.json alone is read.
        gpu_memory_gib: memory of the GPU in GiB.
        gpu_memory_utilization: share of it that the engine may take.
        max_model_len: tokens of one request, prompt and output; the model's own when left out.
        max_num_seqs: requests at once.
        max_num_batched_tokens: tokens a step.
        dtype: of the weights.
        kv_cache_dtype: of keys and values; auto is dtype.
        block_size: token slots per block.
    """

    model: Annotated[str, tyro.conf.Positional]
    gpu_memory_gib: float = 24.0
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8"] = "auto"
    block_size: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.gpu_memory_gib < math.inf:
            raise ValueError(f"gpu_memory_gib = {self.gpu_memory_gib!r}: must be GiB > 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization = {self.gpu_memory_utilization!r}: must be > 0 and <= 1")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value!r}: must be an integer >= 1")


def main(options: Annotated[MemoryOptions, tyro.conf.arg(name="")]) -> int:
    """Print where the memory of a GPU would go; exit code 2 when the model does not fit."""
    import torch

    config = config_alone(options.model)
    most = config.max_position_embeddings
    if options.max_model_len is not None and options.max_model_len > most:
        raise ValueError(f"max_model_len = {options.max_model_len}: {options.model} has {most} positions at most")
    dtype = getattr(torch, options.dtype)
    plan = plan_from_config(
        config,
        dtype,
        total=int(options.gpu_memory_gib * GIB),
        utilization=options.gpu_memory_utilization,
        kv_element_bytes=_KV_BYTES[options.kv_cache_dtype] or dtype.itemsize,
        block_size=options.block_size,
        max_model_len=options.max_model_len or most,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    console = Console()
    for table in tables(plan, config, options):
        console.print(table)
    if options.max_model_len is not None or plan.num_blocks == 0:
        plan.check()
    return 0


def tables(plan: MemoryPlan, config: ModelConfig, options: MemoryOptions) -> list[Table]:
    """Where the memory goes, and what fits."""
    parts = Table(title=f"{options.model} on {options.gpu_memory_gib:g} GiB", title_justify="left")
    parts.add_column("what")
    parts.add_column("GiB", justify="right")
    parts.add_column("of the GPU", justify="right")
    for name, size in plan.parts().items():
        parts.add_row(name, f"{size / GIB:.2f}", f"{size / plan.total:.1%}")
    fits = Table(title="what fits", title_justify="left", show_header=False)
    fits.add_column()
    fits.add_column(justify="right")
    length = options.max_model_len or config.max_position_embeddings
    shape = f"2 x {config.num_layers} layers x {config.num_kv_heads} KV heads x {config.head_dim}"
    kv_bytes = plan.kv_bytes_per_token // config.kv_bytes_per_token
    fits.add_row(f"KV bytes per token ({shape} x {kv_bytes} bytes)", f"{plan.kv_bytes_per_token:,}")
    fits.add_row(f"KV blocks of {plan.block_size} tokens", f"{plan.num_blocks:,}")
    fits.add_row("tokens in the cache", f"{plan.num_tokens:,}")
    fits.add_row(f"requests of {length:,} tokens at once", f"{plan.concurrency(length):.2f}")
    longest = min(plan.num_tokens, config.max_position_embeddings)
    fits.add_row(f"largest max_model_len (the model has {config.max_position_embeddings:,} positions)", f"{longest:,}")
    return [parts, fits]


def config_alone(name: str) -> ModelConfig:
    """A model's configuration without its weights being there or fetched, where its form allows it.

    Raises:
        LoadError: no such model, or its configuration cannot be had or read.
    """
    from research_engine import loading
    from research_engine.loading.source import ModelSource

    path = Path(name).expanduser()
    path = path.parent if path.name == "config.json" else path
    if (path / "config.json").exists():
        return loading.load_config(ModelSource(name, path, "safetensors"))
    if name.count("/") == 1 and not path.exists() and not name.endswith(".gguf"):
        from research_engine.loading.hub import fetch_config

        return loading.load_config(ModelSource(name, fetch_config(name, loading.cache_directory()), "safetensors"))
    return loading.load_config(loading.resolve_model(name, progress=True))
