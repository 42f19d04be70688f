"""How a kernel is timed: cold caches, graph replays on a GPU, and the ceilings of the machine by the same clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import torch

Results = tuple[torch.Tensor, ...]
Run = Callable[[], Results]

WARMUPS = 3
CUDA_FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any GPU
CPU_FLUSH_BYTES = 32 * 2**20


class Timer(Protocol):
    """Runs a callable many times, each with caches that hold none of its data."""

    def prepare(self, run: Run, capturable: bool) -> Run:
        """What to time in place of `run`: a replay of its CUDA graph where it can be captured; runs it on the way."""

    def measure(self, run: Run, repeats: int) -> list[float]:
        """Seconds of each of `repeats` runs, after some that are not timed."""

    def synchronize(self) -> None:
        """Waits until everything that was started has ended."""

    def clear(self) -> bool:
        """Gives memory back. False when a fault has left the device unusable for this process."""


class CpuTimer:
    """Wall clock."""

    def __init__(self) -> None:
        self._flush = torch.empty(CPU_FLUSH_BYTES, dtype=torch.uint8)

    def prepare(self, run: Run, capturable: bool) -> Run:
        """`run` itself."""
        return run

    def measure(self, run: Run, repeats: int) -> list[float]:
        """See `Timer`."""
        for _ in range(WARMUPS):
            run()
        seconds = []
        for _ in range(repeats):
            self._flush.zero_()
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def clear(self) -> bool:
        """Nothing is kept."""
        return True


class CudaTimer:
    """CUDA events around each run, on the current stream of the current device."""

    def __init__(self) -> None:
        self._flush = torch.empty(CUDA_FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def prepare(self, run: Run, capturable: bool) -> Run:
        """See `Timer`. The results that a replay returns are those of the capture, which it writes again."""
        if not capturable:
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    def measure(self, run: Run, repeats: int) -> list[float]:
        """See `Timer`."""
        for _ in range(WARMUPS):
            run()
        begins = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        for begin, end in zip(begins, ends, strict=True):
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in zip(begins, ends, strict=True)]

    def synchronize(self) -> None:
        """See `Timer`."""
        torch.cuda.synchronize()

    def clear(self) -> bool:
        """See `Timer`."""
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile."""
    first, median, third = np.percentile(seconds, (25, 50, 75))
    return float(first), float(median), float(third)


def measure_ceilings(
    names: Iterable[str], timer: Timer, device: torch.device, dtype: torch.dtype, repeats: int
) -> dict[str, float]:
    """What the machine can do, by the clock that the kernels are timed with, medians.

    Args:
        names: which of
            "copy": a copy within the device's memory, or an element-wise kernel where that is faster, bytes read and
            bytes written per second;
            "read": bytes per second that torch's reductions read, the faster of a sum and of row maxima, or the copy's
            figure where that is higher;
            "product": operations per second of a square matrix product;
            "to host", "to device": bytes per second of a copy between pinned memory and the GPU (CUDA alone);
            "launch": seconds of the smallest launch, which are inside every time.
        timer: of `device`.
        device: the machine's part that is measured.
        dtype: of the product.
        repeats: runs of each.
    """
    wanted = set(names)
    on_gpu = device.type == "cuda"
    ceilings: dict[str, float] = {}

    def median(run: Run, capturable: bool = True) -> float:
        return quartiles(timer.measure(timer.prepare(run, capturable), repeats))[1]

    if wanted & {"copy", "read"}:
        size = min(4 * 2**30, torch.cuda.mem_get_info()[0] // 8) // 2**20 * 2**20 if on_gpu else 64 * 2**20
        source = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        # in a graph the copy is the copy engine's, which is slower than a kernel
        copies = (
            median(lambda: (target.copy_(source),), capturable=False),
            median(lambda: (torch.neg(source, out=target),)),
        )
        ceilings["copy"] = 2 * size / min(copies)
        if "read" in wanted:
            rows = source.view(-1, 2**16)
            fastest = min(median(lambda: (source.sum(),)), median(lambda: (rows.amax(dim=1),)))
            ceilings["read"] = max(size / fastest, ceilings["copy"])
        del source, target
    if "product" in wanted:
        n = 8192 if on_gpu else 768
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        ceilings["product"] = 2 * n**3 / median(lambda: (a @ b,))
    if wanted & {"to host", "to device"}:
        size = 2**28
        at_device = torch.empty(size, dtype=torch.uint8, device=device)
        at_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        ceilings["to host"] = size / median(lambda: (at_host.copy_(at_device, non_blocking=True),), capturable=False)
        ceilings["to device"] = size / median(lambda: (at_device.copy_(at_host, non_blocking=True),), capturable=False)
    if "launch" in wanted:
        one = torch.empty(1, device=device)
        ceilings["launch"] = median(lambda: (one.zero_(),))
    return ceilings
