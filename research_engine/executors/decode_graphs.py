"""CUDA graphs of decode steps, one for each batch size of a ladder; a batch runs in the smallest one that holds it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch


def ladder(most: int) -> list[int]:
    """Batch sizes to capture up to `most`, it included: 1, 2, 4, 8, then by 8, and from 128 on by an eighth at most.

    What a padding row costs is its share of the products, and those are free while reading the weights takes longer.
    """
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 4))
    return [*sizes, most]


class DecodeGraphs:
    """Runs a function of a batch size as a graph on a GPU, or as it is elsewhere.

    Args:
        run: the work for a padded batch of that many rows; reads and writes only memory that stays where it is. What it
            returns is the graph's output memory, overwritten by the next replay of any graph.
        sizes: to capture; none runs everything as it is.
        device: of the work.
    """

    def __init__(self, run: Callable[[int], torch.Tensor], sizes: Sequence[int], device: torch.device) -> None:
        self._run = run
        self.sizes = sorted(set(sizes)) if device.type == "cuda" else []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None

    def padded(self, num_rows: int) -> int:
        """Rows that a batch of `num_rows` is run with: those of the smallest graph that holds it, or its own."""
        at = bisect_left(self.sizes, num_rows)
        return self.sizes[at] if at < len(self.sizes) else num_rows

    def run(self, size: int) -> torch.Tensor:
        """The work for `size` rows, as `padded` gave it."""
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

    def _capture(self, size: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up at their first call, which cannot be captured
            self._run(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = self._run(size)
        self._pool = self._pool or graph.pool()
        self._graphs[size] = (graph, output)
