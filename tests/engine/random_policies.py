"""Policies that do anything the rules allow, at random, and plans that break one rule, at random."""

from __future__ import annotations

import random
from collections.abc import Callable

from research_engine.engine.contract import EngineView, Preemption, Request, SchedulePlan, Scheduler


class RandomPolicy(Scheduler):
    """Random preemptions (recompute and swap), random order, random numbers of tokens; keeps every rule by the ledger.

    Args:
        rng: all its randomness.
        preempts: probability that a running request is preempted.
        skips: probability that a request is passed over.
        whole: probability that a request gets all the tokens it can.
    """

    def __init__(self, rng: random.Random, preempts: float, skips: float, whole: float) -> None:
        self.rng = rng
        self.preempts = preempts
        self.skips = skips
        self.whole = whole

    def schedule(self, view: EngineView) -> SchedulePlan:
        rng, ledger = self.rng, view.ledger()
        preempt: list[Preemption] = []
        gone: set[str] = set()
        free = view.num_free_blocks
        stuck = view.num_running > 0 and (free == 0 or all(ledger.cost(r, 1) > free for r in view.running))
        for request in view.running:
            if rng.random() < max(self.preempts, 0.3 * stuck):
                swaps = rng.random() < 0.6 and ledger.can_swap(request)
                mode = "swap" if swaps else "recompute"
                ledger.preempt(request, mode)
                preempt.append(Preemption(request.id, mode, "at random"))
                gone.add(request.id)
        queue = [*view.running, *view.waiting]
        rng.shuffle(queue)
        budget = rng.randint(1, view.max_num_batched_tokens)
        seats = view.max_num_seqs - view.num_running + len(preempt)
        tokens: dict[str, int] = {}
        for request in queue:
            if request.id in gone or budget == 0 or rng.random() < self.skips:
                continue
            if not request.is_running and seats <= 0:
                continue
            most = min(budget, view.uncomputed_tokens(request))
            num_tokens = most if rng.random() < self.whole else rng.randint(1, most)
            if not ledger.grant(request, num_tokens):
                continue
            tokens[request.id] = num_tokens
            budget -= num_tokens
            seats -= not request.is_running
        return SchedulePlan(tokens, tuple(preempt))


Breaker = Callable[[SchedulePlan, EngineView, random.Random], "SchedulePlan | None"]


def _with(plan: SchedulePlan, tokens: dict | None = None, preempt: tuple = ()) -> SchedulePlan:
    return SchedulePlan({**plan.tokens, **(tokens or {})}, (*plan.preempt, *preempt))


def _pick(rng: random.Random, requests: list[Request]) -> Request | None:
    return rng.choice(requests) if requests else None


def unknown_request(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan:
    return _with(plan, {"nobody": 1})


def zero_or_odd_tokens(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    request = _pick(rng, [*view.running, *view.waiting])
    return request and _with(plan, {request.id: rng.choice([0, -1, 1.0, True, None, "2"])})


def more_than_known(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    request = _pick(rng, [*view.running, *view.waiting])
    return request and _with(plan, {request.id: view.uncomputed_tokens(request) + rng.randint(1, 3)})


def preempts_who_does_not_run(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    request = _pick(rng, list(view.waiting))
    return request and _with(plan, preempt=(Preemption(request.id),))


def preempts_nobody_known(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan:
    return _with(plan, preempt=(Preemption("nobody"),))


def preempts_twice(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    request = _pick(rng, list(view.running))
    return request and _with(plan, preempt=(Preemption(request.id), Preemption(request.id)))


def preempts_and_schedules(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    request = _pick(rng, list(view.running))
    return request and _with(plan, {request.id: 1}, (Preemption(request.id),))


def preempts_in_an_unknown_way(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    request = _pick(rng, list(view.running))
    return request and _with(plan, preempt=(Preemption(request.id, "drop"),))  # type: ignore[arg-type]


def preempts_by_something_else(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan:
    return _with(plan, preempt=("nobody",))


def swaps_without_room(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    if sum(request.num_blocks for request in view.running) <= view.num_free_host_blocks:
        return None
    return SchedulePlan({}, [Preemption(request.id, "swap") for request in view.running])


def too_many_seats(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    if view.num_running + view.num_waiting <= view.max_num_seqs or not view.waiting:
        return None
    return SchedulePlan({request.id: 1 for request in view.waiting})  # breaks another rule first if blocks lack


def too_many_blocks_or_tokens(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan | None:
    everyone = [*view.running, *view.waiting]
    tokens = {request.id: view.uncomputed_tokens(request) for request in everyone}
    ledger = view.ledger()
    fits = all(ledger.grant(request, tokens[request.id]) for request in everyone)
    seats = view.num_running + view.num_waiting <= view.max_num_seqs
    return None if fits and seats and sum(tokens.values()) <= view.max_num_batched_tokens else SchedulePlan(tokens)


def wrong_containers(plan: SchedulePlan, view: EngineView, rng: random.Random) -> SchedulePlan:
    tokens = dict(plan.tokens)
    return rng.choice([
        SchedulePlan(list(tokens), plan.preempt),  # type: ignore[arg-type]
        SchedulePlan(None, plan.preempt),  # type: ignore[arg-type]
        SchedulePlan(tokens, (p for p in plan.preempt)),  # type: ignore[arg-type]
        SchedulePlan(tokens, None),  # type: ignore[arg-type]
        SchedulePlan({**tokens, 7: 1}),  # type: ignore[dict-item]
        SchedulePlan(tokens, [Preemption(["x"])]),  # type: ignore[arg-type]
        SchedulePlan(tokens, plan.preempt, None),  # type: ignore[arg-type]
        SchedulePlan(tokens, plan.preempt, ["no room"]),  # type: ignore[arg-type]
    ])  # fmt: skip


BREAKERS: list[Breaker] = [
    unknown_request,
    zero_or_odd_tokens,
    more_than_known,
    preempts_who_does_not_run,
    preempts_nobody_known,
    preempts_twice,
    preempts_and_schedules,
    preempts_in_an_unknown_way,
    preempts_by_something_else,
    swaps_without_room,
    too_many_seats,
    too_many_blocks_or_tokens,
    wrong_containers,
]
