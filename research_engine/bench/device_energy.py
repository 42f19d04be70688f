"""Joules a GPU has used, by the driver's own counter. Stands alone: another engine's interpreter runs it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def energy_counter(index: int = 0) -> Callable[[], float] | None:
    """A function that tells the joules used since the driver was loaded, every process counted.

    The counter (nvmlDeviceGetTotalEnergyConsumption, in mJ, Volta on) moves some ten times a second, so that what it
    tells of less than a second is coarse.

    Args:
        index: of the GPU among those that CUDA_VISIBLE_DEVICES names, or among all.

    Returns:
        None where there is no such driver, GPU or counter.
    """
    found = nvml_device(index)
    if found is None:
        return None
    nvml, device = found
    millijoules = ctypes.c_ulonglong()

    def joules() -> float:
        failed = nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules))
        return float("nan") if failed else millijoules.value / 1000

    return joules if joules() == joules() else None


def nvml_device(index: int = 0) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """NVIDIA's management library and its handle of a GPU; None where there is no such driver or GPU.

    Args:
        index: of the GPU among those that CUDA_VISIBLE_DEVICES names, or among all.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    if nvml.nvmlInit_v2():
        return None
    if name.isdigit():
        missing = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
    else:
        missing = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    return None if missing else (nvml, device)
