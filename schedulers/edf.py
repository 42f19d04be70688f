"""Earliest deadline first, by `request.deadline`.

Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973; it meets all
deadlines if any policy can, and degrades badly under overload, when it serves those that are late already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request

from .kept_queue import Rank
from .ranked import RankedScheduler


@dataclass(kw_only=True)
class EDF(RankedScheduler):
    """The request with the earliest deadline, whoever runs; it takes seats and blocks from those with later ones.

    Waiting bound: with a finite `default_slo`, or for a request that has a deadline, nobody goes before it whose
    deadline is later, so nobody who arrives after its deadline.

    Args:
        default_slo: seconds from arrival to the deadline of a request that brings none; inf serves those last, by
            arrival.
    """

    default_slo: float = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("default_slo", self.default_slo > 0, "seconds > 0 (inf: those without a deadline come last)")

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"deadline": self.rank(request)[0]}

    def rank(self, request: Request) -> Rank:
        deadline = request.deadline
        if deadline is None:
            deadline = request.arrival_time + self.default_slo
        return (deadline, request.arrival_time, request.index)
