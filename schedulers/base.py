"""The usual shape of a policy: three choices, three events; `PolicyScheduler` makes them a plan that keeps the rules.

A policy subclasses it, as a dataclass whose fields are its parameters, and overrides what it cares about:

    order(view)                      whom to serve, in which order, of waiting and running; leaving one out skips it
    quota(request, view, budget)     how many tokens it gets now
    victim(candidates, needy, view)  who gives way when blocks or seats run out, or None
    on_arrival, on_step, on_finish   for policies with state
    explain(request, view)           by what it judged a request, for `--explain`

Choosing a victim has two halves: `yielding` says who may be asked at all, and keeps the policy from running in
circles; a rule picks one of those: the policy's own, or one of victims.py by name.

Why no such policy runs in circles. Say that victims always come after the needy in a total order that only progress
(a token never computed before) can change, and that whoever preempts is served in the same step. Suppose no progress
were ever made again. The order stands still. Its first request is preempted by nobody, so it is served finitely often
(each time it gets nearer to a new token) and preempts finitely often; from then on the same holds for the second, and
so on: in the end nobody is served. But then all others are candidates for the first of those that run, which fits
alone, so it is served. The default order is that of admission; ranked.py has the policy's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from research_engine.engine.contract import (
    BlockLedger,
    EngineView,
    Fact,
    Preemption,
    PreemptionMode,
    Request,
    SchedulePlan,
    Scheduler,
)

from .explanation import Explanation
from .victims import VICTIM_RULES, last_admitted


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
        preemption: what victims do; "cheaper" takes for each victim the one that costs less by the figures below.
            "swap" falls back to recompute when the host has no room.
        overtaking: go on to later waiting requests when an earlier one could not be admitted.
        victim_rule: who gives way, of those that may be asked: a name out of victims.py; None is the policy's own rule.
        recompute_seconds: what computing one token again costs, for "cheaper".
        swap_seconds: what moving one block to the host and back costs, for "cheaper".
    """

    watermark: float = 0.01
    admission: Literal["whole", "chunk"] = "whole"
    preemption: Literal["recompute", "swap", "cheaper"] = "recompute"
    overtaking: bool = False
    victim_rule: str | None = None
    recompute_seconds: float = 1e-4
    swap_seconds: float = 5e-4
    admission_closed: bool = field(default=False, init=False, repr=False)  # set for the step once one did not fit
    planned: Mapping[str, int] = field(default_factory=dict, init=False, repr=False)  # the step's plan so far
    wake_at: float | None = field(default=None, init=False, repr=False)  # set in `order`: until when to wait
    rest: str = field(default="", init=False, repr=False)  # set in `order`: why it names nobody else, for explanations

    def __post_init__(self) -> None:
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark = {self.watermark!r}: must be a share of the blocks, >= 0 and < 1")
        for name, valid in (("admission", ("whole", "chunk")), ("preemption", ("recompute", "swap", "cheaper"))):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(map(repr, valid))}")
        for name in ("recompute_seconds", "swap_seconds"):
            self._check(name, getattr(self, name) >= 0, "seconds >= 0")
        if self.victim_rule is not None:
            rules = ", ".join(map(repr, VICTIM_RULES))
            self._check("victim_rule", self.victim_rule in VICTIM_RULES, f"one of {rules}, or None: the policy's own")
            own = type(self).victim is not PolicyScheduler.victim
            self._check("victim_rule", not own, f"None, for {type(self).__name__} has a method victim of its own")

    def _check(self, name: str, holds: bool, rule: str) -> None:
        """Refuse a parameter that breaks its rule."""
        if not holds:
            raise ValueError(f"{name} = {getattr(self, name)!r}: must be {rule}")

    # The three choices.

    def order(self, view: EngineView) -> Iterable[Request]:
        """Whom to serve, in which order. Default: running requests as admitted, then waiting ones as they arrived."""
        yield from view.running
        yield from self.newcomers(view)

    def newcomers(self, view: EngineView) -> Iterable[Request]:
        """Waiting requests by arrival as long as one can be admitted: for use in `order`, so that it ends in time."""
        seats = view.max_num_seqs - view.num_running
        if seats <= 0:
            return
        for request in view.waiting_in_turn():
            if self.admission_closed:
                return
            yield request
            if request.id in self.planned:
                seats -= 1
                if seats == 0:
                    self.rest = "waits: no seat is free"
                    return

    def quota(self, request: Request, view: EngineView, budget: int) -> int:
        """How many tokens it gets at most, of the `budget` left in this step; 0 skips it. Default: all that is left."""
        return budget

    def victim(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Request | None:
        """Who gives way to `needy`, or None. Default: by `victim_rule`, of those that `yielding` lets be asked.

        Args:
            candidates: running requests not served in this step, in order of admission; never empty.
        """
        may_be_asked = self.yielding(candidates, needy, view)
        if not isinstance(may_be_asked, Sequence):
            raise self._wrong("yielding", may_be_asked, "the candidates that may be asked, a list or tuple of them")
        if not may_be_asked:
            return None
        if self.victim_rule is None:
            own = self.own_victim(may_be_asked, view)
            if own not in may_be_asked:
                raise self._wrong("own_victim", own, "one of the candidates")
            return own
        return VICTIM_RULES[self.victim_rule](may_be_asked, view)

    def yielding(self, candidates: Sequence[Request], needy: Request, view: EngineView) -> Sequence[Request]:
        """Which candidates may be asked to give way to `needy`, whatever the rule that picks one of them.

        Default: those admitted after it, and nobody for a waiting request. So the request that has run longest is
        never preempted: somebody always gets on, and no two requests can take each other's blocks in turn.
        """
        if not needy.is_running:
            return ()
        later = set(view.running[view.running.index(needy) + 1 :])
        return [request for request in candidates if request in later]

    def own_victim(self, candidates: Sequence[Request], view: EngineView) -> Request:
        """The policy's own rule, for victim_rule = None. Default: the last admitted."""
        return last_admitted(candidates, view)

    def mode(self, victim: Request) -> PreemptionMode:
        """How a victim gives way, if the host has room for it. Default: as `preemption` says."""
        if self.preemption == "cheaper":
            swap = self.swap_seconds * victim.num_blocks
            return "swap" if swap < self.recompute_seconds * victim.num_computed_tokens else "recompute"
        return self.preemption

    def explain(self, request: Request, view: EngineView) -> Mapping[str, Fact]:
        """What the policy goes by in the case of this request: name -> number or text.

        Asked only where reasons are wanted, and of those alone whom the step admits, passes over or preempts.
        """
        return {"arrived": request.arrival_time}

    # The plan they make.

    def schedule(self, view: EngineView) -> SchedulePlan:
        plan = _Draft(self, view)
        tokens, gone, quota_of, why = plan.tokens, plan.gone, self.quota, plan.why
        self.admission_closed, self.planned, self.wake_at, self.rest = False, tokens, None, ""
        order = self.order(view)
        if not isinstance(order, Iterable):
            raise self._wrong("order", order, "the requests to serve, in order: yield them, or return a list of them")
        requests, most = iter(order), 2 * (view.num_running + view.num_waiting)
        for request in islice(requests, most):
            try:
                budget, name, running = plan.budget, request.id, request.is_running
            except AttributeError:
                raise self._wrong("order", request, "requests, of view.running and view.waiting", "yielded") from None
            if budget <= 0:
                break
            if name in tokens or name in gone or (self.admission_closed and not running):
                continue
            try:
                num_tokens = quota_of(request, view, budget)
                if type(num_tokens) is not int:
                    raise self._wrong("quota", num_tokens, "a number of tokens, an int")
                known = request.num_uncomputed_tokens if running else view.uncomputed_tokens(request)
                num_tokens = min(num_tokens, budget, known)
                if running:
                    if num_tokens > 0 and plan.ledger.grant(request, num_tokens):  # nearly always
                        tokens[name] = num_tokens
                        plan.budget = budget - num_tokens
                    elif num_tokens > 0:
                        plan.serve(request, num_tokens)
                    elif why is not None:
                        why.skipped(request, budget)
                elif not (num_tokens > 0 and plan.admit(request, num_tokens)):
                    if why is not None and num_tokens <= 0:
                        why.skipped(request, budget)
                    if not self.overtaking:
                        self.admission_closed = True
            except Exception as error:
                vars(error)["request_id"] = name  # for the engine, which names it
                raise
        else:
            if next(requests, None) is not None:
                name, count = type(self).__name__, view.num_running + view.num_waiting
                raise ValueError(f"{name}.order yielded more than {most} requests and there are {count}; it must end")
        if why is None:
            return SchedulePlan(tokens, plan.preempt, wake_at=self.wake_at)
        return why.finish(tokens, plan.preempt, plan.budget)

    def _wrong(self, hook: str, value: object, right: str, did: str = "returned") -> TypeError:
        """What a hook returned, and what it should."""
        verb = {"returned": "return", "yielded": "yield"}[did]
        return TypeError(f"{type(self).__name__}.{hook} {did} {value!r}; it must {verb} {right}")


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
        self.why = Explanation(policy, view) if view.explains else None

    def serve(self, request: Request, num_tokens: int) -> bool:
        """Give a running request its tokens, from victims' blocks if it must be."""
        if not self.ledger.grant(request, num_tokens) and not self._make_room(request, num_tokens, 0):
            if self.why is not None:
                self.why.paused(request, num_tokens, self.ledger)
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
            if self.why is not None:
                self.why.waits(request, whole, reserve, self.seats, self.ledger)
            return False
        if self.why is not None:
            self.why.admitted(request)
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
                raise self.policy._wrong("victim", victim, "one of the candidates, or None")
            if self.why is not None:
                self.why.asked(victim, candidates, needy)
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
            if self.why is not None:
                self.why.preempts(victims)
            self.ledger = ledger
            self.seats += len(chosen)
            self.preempt += chosen
            self.gone.update(victim.id for victim in victims)
            return True
        return False

    def _give_way(self, victim: Request, needy: Request, ledger: BlockLedger) -> Preemption:
        """Enter one preemption."""
        mode = self.policy.mode(victim)
        if mode not in ("recompute", "swap"):
            raise self.policy._wrong("mode", mode, "'recompute' or 'swap'")
        if not ledger.can_swap(victim):
            mode = "recompute"
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
