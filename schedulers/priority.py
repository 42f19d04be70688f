"""Strict priority with ageing: the most urgent first, and nobody waits for ever.

A request of priority p that arrived at time a ranks as p + a / ageing: `ageing` seconds of waiting are worth one level.
The rank never changes, so two requests never swap places, and only requests that arrive within
ageing x (p - p') seconds after a request can overtake it, p' being the most urgent priority in use: a bounded wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request

from .ranked import RankedScheduler


@dataclass(kw_only=True)
class Priority(RankedScheduler):
    """Serves by rank; a waiting request takes the place of running ones of strictly lower priority, never of equals.

    Waiting bound: of those that arrive later, only requests that are d levels more urgent and arrive within ageing x d
    seconds after it go before a request (with a finite `ageing`).

    Args:
        ageing: seconds of waiting that are worth one priority level; inf turns ageing off.
    """

    ageing: float = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ageing > 0:
            raise ValueError(f"ageing = {self.ageing!r}: must be seconds > 0 (inf: no ageing)")

    def rank(self, request: Request) -> tuple[float, float, int]:
        """Smaller is more urgent."""
        aged = 0.0 if math.isinf(self.ageing) else request.arrival_time / self.ageing
        return (request.priority + aged, request.arrival_time, request.index)

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"priority": request.priority, "aged rank": self.rank(request)[0]}

    def yielding(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Sequence[Request]:
        after = super().yielding(candidates, needy, view)
        return after if needy.is_running else [request for request in after if request.priority > needy.priority]
