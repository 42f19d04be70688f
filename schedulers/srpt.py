"""Shortest remaining processing time: as sjf, but a shorter job takes the place of a longer one that runs.

Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline", Operations Research 1968;
with predicted lengths Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs" (TRAIL), ICLR 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request

from .kept_queue import Rank
from .ranked import RankedScheduler
from .sjf import SJF
from .victims import predicted_outputs_left


@dataclass(kw_only=True)
class SRPT(SJF):
    """Fewest tokens to compute first, whoever runs; parameters and waiting bound as those of `SJF`.

    A running request gives way only to one with fewer output tokens to come (aged alike), for those change by progress
    alone, while what is cached comes and goes; so no two requests ever take each other's place in turn.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._at_arrival: dict[str, float] = {}  # its rank then

    def rank(self, request: Request) -> Rank:
        rank = self._at_arrival[request.id]
        if request.is_running:
            rank -= request.num_computed_tokens
        return (rank, request.arrival_time, request.index)

    def on_arrival(self, request: Request) -> None:
        self._at_arrival[request.id] = self.length(request) + self.ageing * request.arrival_time
        super().on_arrival(request)

    def on_finish(self, request: Request) -> None:
        super().on_finish(request)
        del self._at_arrival[request.id]

    def order(self, view: EngineView) -> Iterable[Request]:
        return RankedScheduler.order(self, view)

    def yielding(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Sequence[Request]:
        own = self.outputs_left(needy)
        return [request for request in candidates if self.outputs_left(request) > own]

    def own_victim(self, candidates: Sequence[Request], view: EngineView) -> Request:
        return max(candidates, key=self.outputs_left)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {**super().explain(request, view), "output tokens left, aged": self.outputs_left(request)[0]}

    def outputs_left(self, request: Request) -> Rank:
        """The order of giving way."""
        return (predicted_outputs_left(request) + self.ageing * request.arrival_time, request.index)
