"""How fast a checkpoint becomes a model: its files from the page cache, in bytes per second, and the memory taken."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from research_engine import loading
from research_engine.loading.errors import LoadError
from research_engine.options import choose_device, choose_dtype

if TYPE_CHECKING:
    import torch

_SHARD_BYTES = 2 << 30


@dataclass(frozen=True)
class LoadBenchOptions:
    """What to measure.

    Args:
        model: a directory or file, as `research-engine` takes it everywhere; a dummy is first written as safetensors.
        dtype: of the weights in memory, and of a dummy's files: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        repeats: loads that are timed, after one that brings the files into the page cache.
        scratch: where a dummy's files are written, in a directory that is deleted in the end; the system's place for
            temporary files when left out.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    repeats: int = 3
    scratch: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: must be >= 1")
        if self.scratch is not None and not self.scratch.is_dir():
            raise ValueError(f"scratch = {str(self.scratch)!r}: there is no such directory")


def main(options: Annotated[LoadBenchOptions, tyro.conf.arg(name="")]) -> int:
    """Load a model several times from the page cache: seconds, bytes of its files per second, peak memory.

    Args:
        options: what to measure.
    """
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    source = loading.resolve_model(options.model)
    with ExitStack() as stack:
        if source.format == "dummy":
            directory = stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch))
            write_dummy(options.model, Path(directory), dtype, device)
            source = loading.resolve_model(directory)
        if source.path is None:
            raise LoadError(f"{options.model}: has no files to load; name a directory or a .gguf file")
        suffix = {"safetensors": "*.safetensors", "bin": "*.bin"}.get(source.format)
        files = [source.path] if suffix is None else sorted(source.path.glob(suffix))
        size, seconds, peaks = sum(file.stat().st_size for file in files), [], []
        for repeat in range(options.repeats + 1):
            peak = _Peak(device)
            start = time.perf_counter()
            model = loading.load_model(source, dtype=dtype, device=device, progress=False)
            if device.type == "cuda":
                import torch

                torch.cuda.synchronize(device)
            if repeat:
                seconds.append(time.perf_counter() - start)
                peaks.append(peak.read())
            del model
    median = statistics.median(seconds)
    memory = ", ".join(f"{name} {max(peak[name] for peak in peaks) / 2**30:.2f} GiB" for name in peaks[0])
    Console().print(
        f"{options.model}: {size / 2**30:.2f} GiB in {len(files)} files to {dtype} on {device}: {median:.2f} s "
        f"({min(seconds):.2f} to {max(seconds):.2f}), {size / median / 1e9:.2f} GB/s; peak {memory or 'unknown'}"
    )
    return 0


class _Peak:
    """What memory is taken beyond what is there when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, _status("VmRSS")
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
        except OSError:
            self._before = None
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated = torch.cuda.memory_allocated(device)

    def read(self) -> dict[str, int]:
        """Bytes by a name, none where they cannot be had. A host's count the mapped pages of the files."""
        found = {}
        if self._device.type == "cuda":
            import torch

            found["on the device"] = torch.cuda.max_memory_allocated(self._device) - self._allocated
        highest = _status("VmHWM")
        if self._before is not None and highest is not None:
            found["of the process, mapped pages included"] = highest - self._before
        return found


def _status(key: str) -> int | None:
    """A size of this process, in bytes; None where there is no /proc."""
    if not sys.platform.startswith("linux"):
        return None
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), None)


def write_dummy(name: str, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
    """Write a dummy as a Hugging Face directory: safetensors in shards of 2 GiB at most, index and config.json.

    Raises:
        ValueError: its weights are quantised.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from research_engine.loading.dummy import DUMMY_MODELS, DummyCheckpoint, hf_config

    config = DUMMY_MODELS[name].config
    if config.quantization is not None:
        raise ValueError(f"model = {name!r}: a quantised dummy has no files' form; name one with float weights")
    checkpoint = DummyCheckpoint(name, config, 0)
    shards: list[list[str]] = [[]]
    taken = 0
    for tensor, shape in checkpoint.shapes().items():
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if shards[-1] and taken + size > _SHARD_BYTES:
            shards.append([])
            taken = 0
        shards[-1].append(tensor)
        taken += size
    placed: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        contents = {tensor: checkpoint.read(tensor, device).to(dtype).cpu() for tensor in tensors}
        try:
            save_file(contents, directory / file)
        except SafetensorError as error:
            raise ValueError(f"{directory / file}: cannot be written: {error}") from error
        placed |= dict.fromkeys(tensors, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (directory / "config.json").write_text(json.dumps(hf_config(name)))
