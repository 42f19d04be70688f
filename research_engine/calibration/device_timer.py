"""How long a device works on a step, apart from how long the host takes to hand it over."""

from __future__ import annotations

import time
from typing import Any, Protocol

_CYCLES_PER_SECOND = 2e9  # of a GPU's clock at most, so that it is held for no shorter than asked for
FIRST_HOLD = 0.02


class DeviceTimer(Protocol):
    """Times what the device is given between `begin` and `end`.

    Attributes:
        apart: the device works by itself, while the host goes on.
    """

    apart: bool

    def begin(self, hold: float) -> None:
        """Start; a device that works by itself first waits for `hold` seconds, so that it finds all of the work."""
        ...

    def end(self) -> None:
        """All work has been handed over."""
        ...

    def seconds(self) -> float:
        """What it took; waits until the device is done."""
        ...


class HostTimer:
    """For a device that is the host itself."""

    apart = False

    def begin(self, hold: float) -> None:
        self._began = time.perf_counter()

    def end(self) -> None:
        self._ended = time.perf_counter()

    def seconds(self) -> float:
        return self._ended - self._began


class CudaTimer:
    """Two events on the current stream, behind a kernel that does nothing for a while.

    Args:
        device: "cuda" or "cuda:N".
    """

    apart = True

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def begin(self, hold: float) -> None:
        with self._torch.cuda.device(self._device):
            self._torch.cuda._sleep(int(hold * _CYCLES_PER_SECOND))
            self._events[0].record()

    def end(self) -> None:
        with self._torch.cuda.device(self._device):
            self._events[1].record()

    def seconds(self) -> float:
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3


def timer_of(device: str) -> DeviceTimer:
    """The timer for "cpu", "cuda" or "cuda:N"."""
    return CudaTimer(device) if device.startswith("cuda") else HostTimer()
