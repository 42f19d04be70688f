"""What is done in a step whose policy failed, when the engine is to go on: everybody by arrival, nothing clever."""

from __future__ import annotations

from .contract import BlockLedger, EngineView, Preemption, Request, SchedulePlan


def plan_by_arrival(view: EngineView, why: str) -> SchedulePlan:
    """Running requests as admitted, then waiting ones by arrival, as far as budget, seats and blocks last.

    If that serves nobody, the request that has run longest gets the blocks of those admitted last, so that somebody
    always gets on.

    Args:
        why: of the failure, for the decision log.
    """
    tokens = _served(view, (*view.running, *view.waiting), view.ledger())
    if tokens or not view.running:
        return SchedulePlan(tokens, rest=why)
    (first, *others), ledger = view.running, view.ledger()
    preempt: list[Preemption] = []
    while others and not tokens:
        victim = others.pop()
        ledger.preempt(victim)
        preempt.append(Preemption(victim.id, "recompute", f"made room for {first.id}"))
        tokens = _served(view, (first,), ledger.copy())
    return SchedulePlan(tokens, preempt, rest=why)


def _served(view: EngineView, requests: tuple[Request, ...], ledger: BlockLedger) -> dict[str, int]:
    """Request id -> tokens, for those that fit one after the other; enters them into the ledger."""
    tokens: dict[str, int] = {}
    budget, seats = view.max_num_batched_tokens, view.max_num_seqs - view.num_running
    for request in requests:
        num_tokens = min(budget, view.uncomputed_tokens(request))
        if num_tokens <= 0 or (not request.is_running and seats <= 0):
            break
        if ledger.grant(request, num_tokens):
            tokens[request.id] = num_tokens
            budget -= num_tokens
            seats -= not request.is_running
        elif not request.is_running:
            break
    return tokens
