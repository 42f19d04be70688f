"""One trial of a kernel: checked against the oracle, timed, measured against the machine's roofline."""

from __future__ import annotations

import time
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.config import ConfigError
from experiments.environment import trial_environment
from experiments.kernel_settings import KernelSettings
from experiments.plan import Trial
from experiments.storage import new_directory, write_json, write_with
from research_engine.other_load import DISTURBED_ABOVE, CoreWatch

if TYPE_CHECKING:
    import torch

    from research_engine.bench.kernel_timing import Timer


class KernelError(RuntimeError):
    """A kernel does not take the case, or gives wrong results; it was not timed."""


def check_kernel(settings: KernelSettings) -> None:
    """Raises ConfigError: the device is not there, its kernels lack the path or the dtype, or it has no variants."""
    from research_engine.bench.kernel_ops import OPS

    device = _device(settings.device, settings.dtype)
    op = OPS[settings.op]
    paths = op.cuda_paths if device.type == "cuda" else op.cpu_paths
    if settings.path not in paths:
        raise ConfigError(f"path = {settings.path!r}: {settings.op} on {device.type} has {', '.join(paths)}")
    if settings.variant and device.type != "cuda":
        raise ConfigError(
            f"variant = {dict(settings.variant)}: compiled for CUDA devices alone, and this is {device.type}"
        )


def run_kernel_trial(trial: Trial, directory: Path) -> dict[str, Any]:
    """Time the kernel and write `directory`: summary.json, timing.json, environment.json and runs.parquet, a row a
    timed run.

    Returns:
        The summary.

    Raises:
        KernelError: the kernel refuses the case, or its results are wrong.
    """
    import torch

    from research_engine.bench.kernel_ops import OPS
    from research_engine.bench.kernel_problems import Setting
    from research_engine.bench.kernel_report import Case
    from research_engine.bench.kernels import device_name, needed_ceilings, time_case

    settings, begin, ran_under = trial.settings, time.monotonic(), trial_environment()
    assert isinstance(settings, KernelSettings)
    device, dtype = _device(settings.device, settings.dtype), getattr(torch, settings.dtype)
    op = OPS[settings.op]
    case = Case(settings.op, op.parse(settings.shape), settings.kernel_path)
    timer = _timer(device.type)
    ceilings = _ceilings(frozenset(needed_ceilings([case])), device.type, settings.dtype)
    watch = CoreWatch()
    setting = Setting(device, dtype, settings.kernel_path, trial.seed, settings.split_size)
    measured = time_case(case, setting, settings.repeats, timer)
    others = watch.others()
    timer.clear()
    if measured.status != "ok":
        raise KernelError(f"{measured.status}: {measured.note}")
    low, median, high = measured.quartiles
    work = measured.work
    roofline = max(work.bytes / ceilings[work.bandwidth], work.operations / ceilings.get("product", float("inf")))
    summary = {
        "cell": trial.cell, "levels": dict(trial.levels), "seed": trial.seed, "repeat": trial.repeat, "key": trial.key,
        "kind": "real", "machine": device_name(device), "void": False, "unstable": False,
        "other_load": others, "disturbed": device.type == "cpu" and others is not None and others > DISTURBED_ABOVE,
        "kernel": settings.describe(), "ceilings": ceilings,
        "workload": {"num_requests": settings.repeats, "origin": f"timed runs of {settings.op}, cold caches"},
        "metrics": {
            "kernel_time": {"mean": sum(measured.seconds) / len(measured.seconds), "p25": low, "p50": median,
                            "p75": high, "count": len(measured.seconds)},
            "bytes_per_second": work.bytes / median,
            "operations_per_second": work.operations / median,
            "roofline_share": roofline / median,
            "relative_error": measured.relative_error,
        },
    }  # fmt: skip
    with new_directory(directory) as fresh:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.table({"run": list(range(len(measured.seconds))), "seconds": list(measured.seconds)})
        write_with(fresh / "runs.parquet", partial(pq.write_table, table))
        write_json(fresh / "environment.json", ran_under)
        write_json(fresh / "timing.json", {"wall_seconds": time.monotonic() - begin})
        write_json(fresh / "summary.json", summary)
    return summary


def _device(name: str, dtype: str) -> torch.device:
    from research_engine.bench.kernels import KernelBenchOptions, choose_device

    try:
        return choose_device(KernelBenchOptions(device=name, dtype=dtype))
    except ValueError as error:
        raise ConfigError(str(error)) from error


@lru_cache(maxsize=2)
def _timer(device: str) -> Timer:
    from research_engine.bench.kernel_timing import CpuTimer, CudaTimer

    return CudaTimer() if device == "cuda" else CpuTimer()


@lru_cache(maxsize=16)
def _ceilings(names: frozenset[str], device: str, dtype: str) -> dict[str, float]:
    """Measured once a process."""
    import torch

    from research_engine.bench.kernel_timing import measure_ceilings

    return measure_ceilings(sorted(names), _timer(device), torch.device(device), getattr(torch, dtype), 20)
