"""Longest cached prefix first: use what the cache holds before it is evicted.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", NeurIPS 2024, section 3 (cache-aware
scheduling for RadixAttention).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request

from .base import PolicyScheduler


@dataclass(kw_only=True)
class PrefixAware(PolicyScheduler):
    """Running requests as admitted, then the waiting one with the most cached tokens, with credit for waiting.

    Waiting bound: a request ranks by cached tokens + ageing x seconds waited, so nobody who arrives more than
    max_model_len / ageing seconds after it goes before it (unless `overtaking` is on).

    Args:
        ageing: cached tokens that a second of waiting is worth; 0 turns ageing off, and the bound with it.
        window: so many of those that wait longest are looked up in the cache; the rest follow by arrival.
    """

    ageing: float = 100.0
    window: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("ageing", self.ageing >= 0, "tokens per second >= 0 (0: no ageing)")
        self._check("window", isinstance(self.window, int) and self.window >= 1, "an integer >= 1")

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        if view.num_running >= view.max_num_seqs:  # nobody can be admitted: nothing to look up
            return
        waiting = view.waiting
        for request in sorted(waiting[: self.window], key=lambda request: self.rank(request, view)):
            if self.admission_closed:
                return
            yield request
        for request in waiting[self.window :]:
            if self.admission_closed:
                return
            yield request

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"cached tokens": view.cached_tokens(request), "aged worth": self.rank(request, view)[0]}

    def rank(self, request: Request, view: EngineView) -> tuple[float, float, int]:
        """Smaller is admitted first; changes with the cache."""
        worth = self.ageing * request.arrival_time - view.cached_tokens(request)
        return (worth, request.arrival_time, request.index)
