"""How fast a checkpoint becomes a model: the file from the page cache, in bytes of the checkpoint per second."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from research_engine import loading
from research_engine.loading.errors import LoadError
from research_engine.options import choose_device, choose_dtype


@dataclass(frozen=True)
class LoadBenchOptions:
    """What to measure.

    Args:
        model: a directory or file, as `research-engine` takes it everywhere; a dummy has no file to read.
        dtype: of the weights in memory: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        repeats: loads that are timed, after one that brings the files into the page cache.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: must be >= 1")


def main(options: Annotated[LoadBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Load a model several times from the page cache; seconds and bytes of its files per second.

    Args:
        options: what to measure.
    """
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    source = loading.resolve_model(options.model)
    if source.path is None:
        raise LoadError(f"{options.model}: has no files to load; name a directory or a .gguf file")
    suffix = {"safetensors": "*.safetensors", "bin": "*.bin"}.get(source.format)
    files = [source.path] if suffix is None else sorted(source.path.glob(suffix))
    size, seconds = sum(file.stat().st_size for file in files), []
    for repeat in range(options.repeats + 1):
        start = time.perf_counter()
        model = loading.load_model(source, dtype=dtype, device=device, progress=False)
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
        if repeat:
            seconds.append(time.perf_counter() - start)
        del model
    median = statistics.median(seconds)
    Console().print(
        f"{options.model}: {size / 2**30:.2f} GiB in {len(files)} files to {dtype} on {device}: {median:.2f} s "
        f"({min(seconds):.2f} to {max(seconds):.2f}), {size / median / 1e9:.2f} GB/s"
    )
    return 0
