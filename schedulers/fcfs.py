"""First come, first served, whole prompts, prefill before decode: the way of ORCA and of vLLM's first scheduler.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022, section 4.1.
A prompt is computed in one step, as early as a seat and blocks are free; decodes share what is left of the budget, so a
long prompt holds up every token behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Request

from .base import PolicyScheduler


@dataclass(kw_only=True)
class FCFS(PolicyScheduler):
    """Waiting requests by arrival, then running ones; a prompt is never split unless it alone exceeds the budget.

    Waiting bound: nobody who arrives later is admitted before a request (unless `overtaking` is on).
    """

    def order(self, view: EngineView) -> Iterable[Request]:
        decodes = []
        for request in view.running:
            if request.is_decoding:
                decodes.append(request)
            else:
                yield request  # a prompt begun is ended first
        yield from self.newcomers(view)
        yield from decodes

    def quota(self, request: Request, view: EngineView, budget: int) -> int:
        whole = view.uncomputed_tokens(request)
        return whole if whole <= budget or budget == view.max_num_batched_tokens else 0
