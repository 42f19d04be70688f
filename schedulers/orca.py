"""Iteration-level scheduling: after every step who is done leaves and who waits may join; memory is reserved up front.

Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, Fact, Request

from .base import PolicyScheduler


@dataclass(kw_only=True)
class Orca(PolicyScheduler):
    """By arrival, whoever runs; a request joins only if the slots it may ever need are free of others' claims.

    So nobody is ever preempted, at the price of slots that stand empty. Prompts and decodes share a step (selective
    batching); a prompt is split only by the engine's max_num_batched_tokens. Waiting bound: nobody who arrives later is
    admitted before a request.

    Args:
        max_batch_size: requests that run at once at most; 0 takes the engine's max_num_seqs.
    """

    max_batch_size: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        holds = isinstance(self.max_batch_size, int) and self.max_batch_size >= 0
        self._check("max_batch_size", holds, "an integer >= 0 (0: the engine's max_num_seqs)")

    def order(self, view: EngineView) -> Iterable[Request]:
        yield from view.running
        seats = (self.max_batch_size or view.max_num_seqs) - view.num_running
        if seats <= 0:
            return
        left = view.num_blocks - sum(self.claim(request, view) for request in view.running)
        for request in view.waiting_in_turn():
            left -= self.claim(request, view)
            seats -= 1
            if left < 0 or seats < 0 or self.admission_closed:
                self.rest = "waits: those that run claim too many slots" if left < 0 else ""
                return
            yield request

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        return {"blocks claimed": self.claim(request, view)}

    def claim(self, request: Request, view: EngineView) -> int:
        """Blocks for all tokens it may have; its last token is never computed."""
        return -(-(request.max_num_tokens - 1) // view.block_size)
