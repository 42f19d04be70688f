"""Request-level batching: a batch is formed, runs until its last request ends, and only then comes the next.

The way of FasterTransformer (NVIDIA, 2021) behind a batching server; Yu et al., "Orca", OSDI 2022, section 2 shows what
it costs: early finishers' seats stay empty, and newcomers wait for the longest answer of the batch before them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Request

from .base import PolicyScheduler


@dataclass(kw_only=True)
class StaticBatch(PolicyScheduler):
    """Admits only when nobody runs; a batch is what one step can take of seats, tokens and blocks, by arrival.

    There is no padding here, so what is measured is the waiting alone. Waiting bound: a request is served within as
    many batches as there are requests before it, and nobody who arrives later is admitted first.

    Args:
        batch_size: requests in a batch at most; 0 takes the engine's max_num_seqs.
    """

    batch_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("batch_size", isinstance(self.batch_size, int) and self.batch_size >= 0, "an integer >= 0")

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        self.rest = "waits: the batch before has not ended" if view.running else ""
        if not view.running:
            for request in self.newcomers(view):
                if len(self.planned) == self.batch_size > 0:
                    self.rest = "waits: the batch is full"
                    break
                yield request

    def quota(self, request: Request, view: EngineView, budget: int) -> int:
        whole = view.uncomputed_tokens(request)
        return whole if whole <= budget or budget == view.max_num_batched_tokens else 0
