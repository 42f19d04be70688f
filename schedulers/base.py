"""The usual shape of a policy: three choices, three events; `PolicyScheduler` makes them a plan that keeps the rules.

A policy subclasses it, as a dataclass whose fields are its parameters, and overrides what it cares about:

    order(view)                      whom to serve, in which order, of waiting and running; leaving one out skips it
    quota(request, view, budget)     how many tokens it gets now
    victim(candidates, needy, view)  who gives way when blocks or seats run out, or None
    on_arrival, on_step, on_finish   for policies with state
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from research_engine.engine.contract import (
    BlockLedger,
    EngineView,
    Preemption,
    PreemptionMode,
    Request,
    SchedulePlan,
    Scheduler,
)


@dataclass(kw_only=True)
class PolicyScheduler(Scheduler):
    """Writes `schedule` once, from a policy's choices.

    Served in the policy's order, each request gets its quota while budget, seats and blocks last. A request that lacks
    blocks or a seat may take them from the victims the policy names, of those not yet served in this step; if they
    cannot make enough room nobody is preempted and the request pauses (running) or keeps waiting.

    Args:
        watermark: share of all blocks kept free when a request is admitted while others run, so that those can grow.
        admission: "whole" admits a request when the blocks for all its known tokens are there; "chunk" when those for
            its first chunk are.
        preemption: what victims do; "swap" falls back to recompute when the host has no room.
        overtaking: go on to later waiting requests when an earlier one could not be admitted.
    """

    watermark: float = 0.01
    admission: Literal["whole", "chunk"] = "whole"
    preemption: PreemptionMode = "recompute"
    overtaking: bool = False
    admission_closed: bool = field(default=False, init=False, repr=False)  # set for the step once one did not fit

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark = {self.watermark!r}: must be a share of the blocks, >= 0 and < 1")
        for name, valid in (("admission", ("whole", "chunk")), ("preemption", ("recompute", "swap"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(map(repr, valid))}")

    # The three choices.

    def order(self, view: EngineView) -> Iterable[Request]:
        """Whom to serve, in which order. Default: running requests as admitted, then waiting ones as they arrived."""
        yield from view.running
        yield from view.waiting

    def quota(self, request: Request, view: EngineView, budget: int) -> int:
        """How many tokens it gets at most, of the `budget` left in this step; 0 skips it. Default: all that is left."""
        return budget

    def victim(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Request | None:
        """Who gives way to `needy`. Default: the last admitted, and only to a request that was admitted before it.

        So the request that has run longest is never preempted: somebody always gets on, and no two requests can take
        each other's blocks in turn.

        Args:
            candidates: running requests not served in this step, in order of admission; never empty.
        """
        last = candidates[-1]
        if not needy.is_running or view.running.index(last) < view.running.index(needy):
            return None
        return last

    # The plan they make.

    def schedule(self, view: EngineView) -> SchedulePlan:
        plan = _Draft(self, view)
        tokens, gone, quota_of = plan.tokens, plan.gone, self.quota
        self.admission_closed = False
        for request in self.order(view):
            budget, name, running = plan.budget, request.id, request.is_running
            if budget <= 0:
                break
            if name in tokens or name in gone or (self.admission_closed and not running):
                continue
            num_tokens = quota_of(request, view, budget)
            if type(num_tokens) is not int:
                what = f"{type(self).__name__}.quota returned {num_tokens!r}"
                raise TypeError(f"{what}; it must return a number of tokens, an int")
            known = request.num_uncomputed_tokens if running else view.uncomputed_tokens(request)
            num_tokens = min(num_tokens, budget, known)
            if running:
                if num_tokens > 0:
                    plan.serve(request, num_tokens)
            elif not (num_tokens > 0 and plan.admit(request, num_tokens)) and not self.overtaking:
                self.admission_closed = True
        return SchedulePlan(plan.tokens, plan.preempt, plan.reasons)


class _Draft:
    """A plan in the making: what is left of budget, seats and blocks."""

    def __init__(self, policy: PolicyScheduler, view: EngineView) -> None:
        self.policy = policy
        self.view = view
        self.ledger = view.ledger()
        self.budget = view.max_num_batched_tokens
        self.seats = view.max_num_seqs - view.num_running
        self.tokens: dict[str, int] = {}
        self.preempt: list[Preemption] = []
        self.gone: set[str] = set()
        self.reasons: dict[str, str] = {}

    def serve(self, request: Request, num_tokens: int) -> bool:
        """Give a running request its tokens, from victims' blocks if it must be."""
        if not self.ledger.grant(request, num_tokens) and not self._make_room(request, num_tokens, 0):
            self.reasons[request.id] = f"paused: no blocks for {num_tokens} tokens"
            return False
        self.tokens[request.id] = num_tokens
        self.budget -= num_tokens
        return True

    def admit(self, request: Request, num_tokens: int) -> bool:
        """Let a waiting request in if there is a seat, and room for it and for the growth of those that run."""
        whole = self.view.uncomputed_tokens(request) if self.policy.admission == "whole" else num_tokens
        others = bool(self.tokens) or self.view.num_running > len(self.gone)
        reserve = math.ceil(self.policy.watermark * self.view.num_blocks) if others else 0
        fits = self.seats > 0 and self.ledger.cost(request, whole) + reserve <= self.ledger.free_blocks
        granted = fits and self.ledger.grant(request, num_tokens)
        if not granted and not self._make_room(request, num_tokens, reserve, whole):
            lacks = "blocks" if self.seats > 0 else "seat"
            self.reasons[request.id] = f"waits: no {lacks} for it ({self.ledger.free_blocks} blocks free)"
            return False
        self.seats -= 1
        self.tokens[request.id] = num_tokens
        self.budget -= num_tokens
        return True

    def _make_room(self, needy: Request, num_tokens: int, reserve: int, whole: int | None = None) -> bool:
        """Preempt victims of the policy's choice until `needy` fits; if it cannot, preempt nobody.

        A victim that freed nothing, all its blocks being shared, is spared if the others suffice.
        """
        running = self.view.running
        candidates = [r for r in running if r.id not in self.tokens and r.id not in self.gone and r is not needy]
        ledger, victims, chosen = self.ledger.copy(), [], []
        for_nothing: list[Request] = []  # victims all of whose blocks others held
        while candidates:
            victim = self.policy.victim(candidates, needy, self.view)
            if victim is None:
                return False
            if victim not in candidates:
                name = type(self.policy).__name__
                raise ValueError(f"{name}.victim returned {victim!r}; it must return one of the candidates, or None")
            candidates.remove(victim)
            free = ledger.free_blocks
            victims.append(victim)
            chosen.append(self._give_way(victim, needy, ledger))
            if ledger.free_blocks == free:
                for_nothing.append(victim)
            if not self._fits(needy, num_tokens, reserve, whole, ledger, len(chosen)):
                continue
            for spared in for_nothing:
                fewer, trial = [v for v in victims if v is not spared], self.ledger.copy()
                preempt = [self._give_way(v, needy, trial) for v in fewer]
                if self._fits(needy, num_tokens, reserve, whole, trial, len(fewer)):
                    ledger, victims, chosen = trial, fewer, preempt
            self.ledger = ledger
            self.seats += len(chosen)
            self.preempt += chosen
            self.gone.update(victim.id for victim in victims)
            return True
        return False

    def _give_way(self, victim: Request, needy: Request, ledger: BlockLedger) -> Preemption:
        """Enter one preemption."""
        swaps = self.policy.preemption == "swap" and victim.num_blocks <= ledger.free_host_blocks
        mode: PreemptionMode = "swap" if swaps else "recompute"
        ledger.preempt(victim, mode)
        return Preemption(victim.id, mode, f"made room for {needy.id}")

    def _fits(
        self, needy: Request, num_tokens: int, reserve: int, whole: int | None, ledger: BlockLedger, num_victims: int
    ) -> bool:
        """Whether `needy` gets its tokens after the preemptions entered; if so, they are entered as well."""
        if not needy.is_running:
            lacking = ledger.cost(needy, whole or num_tokens) + reserve > ledger.free_blocks
            if lacking or self.seats + num_victims <= 0:
                return False
        return ledger.grant(needy, num_tokens)
