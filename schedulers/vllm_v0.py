"""Prompts first and never together with decodes: the scheduler of vLLM before version 1.

Preemption and swapping are those of Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023, section 4.5. The system of the paper itself put the prompts and decodes of an iteration into
one step (section 4.3), as `fcfs` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from research_engine.engine.contract import EngineView, PreemptionMode, Request

from .base import PolicyScheduler


@dataclass(kw_only=True)
class VLLMV0(PolicyScheduler):
    """A step holds prompts, or decodes if no prompt can go; swapped requests come back before new ones are admitted.

    The last admitted gives way. A prompt is whole unless it alone exceeds the budget. Waiting bound: nobody who arrives
    later is admitted before a request, but preempted ones come back first (unless `overtaking` is on).

    Args:
        swap_groups: continuations of one prompt (n > 1) are swapped whatever `preemption` says, as recompute would
            give up the blocks they share.
    """

    swap_groups: bool = True

    def order(self, view: EngineView) -> Iterable[Request]:
        decodes = []
        for request in view.running:
            if request.is_decoding:
                decodes.append(request)
            else:
                yield request  # a prompt longer than a step goes on
        somebody_is_swapped = view.num_free_host_blocks < view.config.num_host_blocks
        swapped = [request for request in view.waiting if request.is_swapped] if somebody_is_swapped else []
        if not swapped:
            yield from self.newcomers(view)
        if not self.planned:
            yield from decodes
            yield from swapped
        else:
            self.rest = "waits: a step with prompts holds nothing else"

    def quota(self, request: Request, view: EngineView, budget: int) -> int:
        whole = view.uncomputed_tokens(request)
        return whole if whole <= budget or budget == view.max_num_batched_tokens else 0

    def mode(self, victim: Request) -> PreemptionMode:
        return "swap" if self.swap_groups and victim.id != victim.group_id else super().mode(victim)
