"""Decodes first, then prompts in chunks, all within one token budget: no prompt ever stalls a running answer.

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, algorithm 3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Request

from .base import PolicyScheduler


@dataclass(kw_only=True)
class ChunkedPrefill(PolicyScheduler):
    """Running requests that decode, then prompts under way, then new ones by arrival.

    Waiting bound: nobody who arrives later is admitted before a request (unless `overtaking` is on).

    Args:
        token_budget: tokens per step; 0 takes the engine's max_num_batched_tokens. Smaller ones bound the time between
            tokens, larger ones finish prompts sooner.
    """

    token_budget: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.token_budget, int) or self.token_budget < 0:
            raise ValueError(f"token_budget = {self.token_budget!r}: must be an integer >= 0 (0: the engine's)")

    def order(self, view: EngineView) -> Iterable[Request]:
        prompts = []
        for request in view.running:
            if request.is_decoding:
                yield request
            else:
                prompts.append(request)
        yield from prompts
        yield from self.newcomers(view)

    def quota(self, request: Request, view: EngineView, budget: int) -> int:
        if not self.token_budget or request.is_decoding:
            return budget
        return max(0, budget - max(0, view.max_num_batched_tokens - self.token_budget))
