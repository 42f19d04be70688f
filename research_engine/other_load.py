"""What others take of this machine: the share of its cores while something is timed, and of a GPU before it begins."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

DISTURBED_ABOVE = 0.1
"""Share of the usable cores, taken by other processes, above which times are not those of this machine alone."""


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class CoreWatch:
    """How much of this process's cores other processes take, between its making and `others()`.

    Kernel threads that wait for one another at barriers slow down by much more than the share that others take.
    """

    def __init__(self) -> None:
        self._busy, self._own, self._wall = _busy_seconds(), _own_seconds(), time.perf_counter()

    def others(self) -> float | None:
        """Share of the usable cores' time, from 0 to 1; None where the system does not tell."""
        wall = time.perf_counter() - self._wall
        busy = _busy_seconds()
        if busy is None or self._busy is None or wall <= 0:
            return None
        taken = (busy - self._busy) - (_own_seconds() - self._own)
        return min(1.0, max(0.0, taken / (wall * usable_cores())))


def gpu_load(index: int = 0) -> float | None:
    """Share of the last second or less in which a kernel ran on a GPU, whoever's, as NVML counts it.

    It tells of others alone before this process has used the GPU.

    Args:
        index: of the GPU among those that CUDA_VISIBLE_DEVICES names, or among all.

    Returns:
        From 0 to 1; None where there is no such driver or GPU, or it does not tell.
    """
    from research_engine.bench.device_energy import nvml_device

    found = nvml_device(index)
    if found is None:
        return None
    nvml, device = found
    percent = (ctypes.c_uint * 2)()  # nvmlUtilization_t: of the GPU, of its memory
    failed = nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(percent))
    return None if failed else percent[0] / 100


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    """Seconds that the usable cores were not idle since the system started (Linux: proc(5), /proc/stat)."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
        usable = {f"cpu{index}" for index in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    busy = 0
    for name, *values in (line.split() for line in lines if line.startswith("cpu")):
        if name in usable:
            user, nice, system, _idle, _iowait, *rest = map(int, values[:8])
            busy += user + nice + system + sum(rest)
    return busy / os.sysconf("SC_CLK_TCK")
