"""Shortest job first, without preemption, by what is left to compute; a prefix in the cache makes a job shorter.

Fu et al., "Efficient LLM Scheduling by Learning to Rank", NeurIPS 2024, and Qiu et al., "Efficient Interactive LLM
Serving with Proxy Model-based Sequence Length Prediction" (SSJF), 2024, approximate it with predicted lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from research_engine.engine.contract import EngineView, Fact, Request

from .base import PolicyScheduler
from .kept_queue import Rank
from .ranked import RankedScheduler
from .victims import last_admitted, predicted_outputs_left


@dataclass(kw_only=True)
class SJF(RankedScheduler):
    """Running requests as admitted, then the waiting one with the fewest tokens to compute.

    A job's size is its known tokens less the cached ones, plus the output tokens to come by `request.predicted_tokens`,
    or by max_tokens without a prediction. Waiting bound: a request of size s ranks as s + ageing x arrival time, so
    nobody who arrives more than s / ageing seconds after it goes before it (unless `overtaking` is on).

    Args:
        ageing: tokens that a second of waiting takes off a job's size; 0 turns ageing off, and the bound with it.
        window: so many of the shortest jobs are looked up in the prefix cache in each step; 0 ignores the cache.
    """

    ageing: float = 100.0
    window: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("ageing", self.ageing >= 0, "tokens per second >= 0 (0: no ageing)")
        self._check("window", isinstance(self.window, int) and self.window >= 0, "an integer >= 0")

    def rank(self, request: Request) -> Rank:
        return (self.length(request) + self.ageing * request.arrival_time, request.arrival_time, request.index)

    def length(self, request: Request) -> int:
        """Tokens that it will have computed when it ends, if the prediction is right."""
        return request.num_tokens + predicted_outputs_left(request)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        left = self.length(request) - (0 if request.is_running else view.cached_tokens(request))
        return {"tokens to compute": left, "aged rank": self.rank(request)[0]}

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        if view.num_running >= view.max_num_seqs:  # nobody can be admitted: nothing to look up
            return
        for _, request in self.waiting(view):
            if self.admission_closed:
                break
            yield request

    def waiting(self, view: EngineView) -> Iterable[tuple[Rank, Request]]:
        queue = self.queue.waiting()
        near = [
            ((rank[0] - view.cached_tokens(request), *rank[1:]), request)
            for rank, request in islice(queue, self.window)
        ]
        yield from sorted(near)
        yield from islice(queue, self.window, None)

    def yielding(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Sequence[Request]:
        return PolicyScheduler.yielding(self, candidates, needy, view)

    def own_victim(self, candidates: Sequence[Request], view: EngineView) -> Request:
        return last_admitted(candidates, view)
