"""Policies that serve by a rank, whoever runs: what priority, edf, sjf, srpt, mlfq and slo_aware have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from research_engine.engine.contract import EngineView, Fact, Request

from .base import PolicyScheduler
from .kept_queue import KeptQueue, Rank

if TYPE_CHECKING:
    from research_engine.engine.contract import StepRecord


@dataclass(kw_only=True)
class RankedScheduler(PolicyScheduler):
    """Serves by `rank`, smallest first; a request takes seats and blocks only from those that rank after it.

    A rank may change with the request's progress and must not otherwise change, so that the argument of base.py holds:
    no two requests ever take each other's place in turn.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.queue = KeptQueue(self.rank)
        self._ranks: dict[Request, Rank] = {}  # of the step's running requests

    def rank(self, request: Request) -> Rank:
        """Smaller is served first; unique, so end it with `request.index`."""
        return (request.arrival_time, request.index)

    def order(self, view: EngineView) -> Iterable[Request]:
        running = view.running
        ranks = [self.rank(request) for request in running]
        self._ranks = dict(zip(running, ranks, strict=True))
        sequence = sorted(range(len(running)), key=ranks.__getitem__)
        at, end = 0, len(running)
        for rank, request in self.waiting(view):
            while at < end and ranks[sequence[at]] < rank:
                yield running[sequence[at]]
                at += 1
            if self.admission_closed:
                break
            yield request
        for index in sequence[at:]:
            yield running[index]

    def waiting(self, view: EngineView) -> Iterable[tuple[Rank, Request]]:
        """(rank, request) of those that wait, in order."""
        return self.queue.waiting()

    def yielding(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Sequence[Request]:
        return self.ranked_after(self.rank(needy), candidates)

    def ranked_after(self, rank: Rank, running: Sequence[Request]) -> Sequence[Request]:
        """Of running requests, those that rank after this."""
        known = self._ranks
        return [request for request in running if (known.get(request) or self.rank(request)) > rank]

    def own_victim(self, candidates: Sequence[Request], view: EngineView) -> Request:
        return max(candidates, key=self.rank)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"rank": self.rank(request)[0]}

    def on_arrival(self, request: Request) -> None:
        self.queue.arrive(request)

    def on_step(self, record: StepRecord) -> None:
        self.queue.settle(record)

    def on_finish(self, request: Request) -> None:
        self.queue.finish(request)
