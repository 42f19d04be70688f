"""CUDA graphs of steps, one for each size of a ladder; a step runs in the smallest one that holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Generic, TypeVar

import torch

Output = TypeVar("Output")

_MOST_TOKENS = 1024  # of a step with prompts that is a graph
_TOKENS_APART = 64  # of two such graphs
_LAUNCH_BOUND = 8.4e12  # tokens times parameters: some 20 ms of an H200; launching takes its host 7 to 14 ms
_CLEARLY = 1.1  # how much longer: two starts of an engine should choose alike


def ladder(most: int) -> list[int]:
    """Batch sizes to capture up to `most`, it included: 1, 2, 4, 8, then by 8, and from 128 on by an eighth at most.

    What a padding row costs is its share of the products, and those are free while reading the weights takes longer.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 4))
    return [*sizes, most]


def token_ladder(max_num_batched_tokens: int, num_parameters: int) -> list[int]:
    """Sizes in tokens of steps with prompts to capture: those that take less time to compute than to launch.

    A padding token costs its share of the products, which is nothing as long as the host is what a step waits for.
    """
    most = min(max_num_batched_tokens, _MOST_TOKENS, int(_LAUNCH_BOUND / num_parameters))
    return list(range(_TOKENS_APART, most + 1, _TOKENS_APART))


def worth_keeping(seconds: Mapping[int, float]) -> list[int]:
    """Sizes, ascending, but those that take clearly longer than a larger one, which holds their steps as well.

    A library chooses a kernel for each shape, and not always well: on an H200 a step of 448 tokens took Llama-3.1-8B's
    shape 15.4 ms, and one of 512 tokens 11.9.

    Args:
        seconds: of a step of each size.
    """
    kept, fastest = [], float("inf")
    for size in sorted(seconds, reverse=True):
        if seconds[size] <= _CLEARLY * fastest:
            kept.append(size)
        fastest = min(fastest, seconds[size])
    return kept[::-1]


class StepGraphs(Generic[Output]):
    """Runs a function of a size as a graph on a GPU, or as it is elsewhere.

    Args:
        run: the work for a step padded to that size; reads and writes only memory that stays where it is. What it
            returns is the graph's output memory, overwritten by the next replay of any graph.
        sizes: to capture; none runs everything as it is.
        device: of the work.
    """

    def __init__(self, run: Callable[[int], Output], sizes: Sequence[int], device: torch.device) -> None:
        self._run = run
        self.sizes = sorted(set(sizes)) if device.type == "cuda" else []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Output]] = {}
        self._pool: Any = None
        # one for all: libraries and the allocator keep memory for every stream that they were used on
        self._stream = torch.cuda.Stream(device) if self.sizes else None

    def padded(self, size: int) -> int:
        """What a step of `size` is run with: the smallest graph that holds it, or its own size."""
        at = bisect_left(self.sizes, size)
        return self.sizes[at] if at < len(self.sizes) else size

    def run(self, size: int) -> Output:
        """The work for `size`, as `padded` gave it."""
        if size not in self.sizes:
            return self._run(size)
        if size not in self._graphs:
            self._capture(size)
        graph, output = self._graphs[size]
        graph.replay()
        return output

    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture every size, the largest first, so that the others find their memory in its pool.

        Args:
            progress: called with (captured, all) after each.
        """
        for done, size in enumerate(reversed(self.sizes), 1):
            if size not in self._graphs:
                self._capture(size)
            if progress is not None:
                progress(done, len(self.sizes))
        if self.sizes:
            torch.cuda.empty_cache()  # what the runs before the captures took

    def drop_slow(self) -> None:
        """Leave out the sizes that are not `worth_keeping`, by replays of what was captured."""
        self.sizes = worth_keeping({size: self._seconds(size) for size in self.sizes})
        self._graphs = {size: self._graphs[size] for size in self.sizes}

    def _seconds(self, size: int) -> float:
        graph, _ = self._graphs[size]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
        for end in ends:
            graph.replay()
            end.record()
        ends[-1].synchronize()
        return median(begin.elapsed_time(end) for begin, end in pairwise(ends[1:])) * 1e-3

    def _capture(self, size: int) -> None:
        stream = self._stream
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up at their first call, which cannot be captured
            self._run(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = self._run(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = (graph, output)
