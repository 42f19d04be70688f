"""Why a step's plan is as it is: what `PolicyScheduler` notes while it makes one, for views that ask for reasons.

Texts are the same as long as the reason is, and what changes from step to step is in the numbers beside them, so that
whoever reads a run can put steps together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from research_engine.engine.contract import BlockLedger, EngineView, Fact, Preemption, Request, SchedulePlan

from .victims import predicted_outputs_left

if TYPE_CHECKING:
    from .base import PolicyScheduler

SHOWN_CANDIDATES = 8


class Explanation:
    """Notes of one step."""

    def __init__(self, policy: PolicyScheduler, view: EngineView) -> None:
        self._policy = policy
        self._view = view
        self._reasons: dict[str, str] = {}
        self._seen: dict[str, dict[str, Fact]] = {}
        self._asked: dict[str, tuple[str, Sequence[Request]]] = {}  # victim -> why, and who else could have been
        self._not_admitted: Request | None = None  # the last one that failed

    def admitted(self, request: Request) -> None:
        self._note(request, "admitted", {"cached tokens": self._view.cached_tokens(request)})

    def waits(self, request: Request, num_tokens: int, reserve: int, seats: int, ledger: BlockLedger) -> None:
        """It could not be admitted: there is no seat, or too few blocks are free beside those kept for growth."""
        self._not_admitted = request
        if seats <= 0:
            self._note(request, "waits: no seat for it", {"running": self._view.num_running})
        else:
            blocks = {"blocks needed": ledger.cost(request, num_tokens), "blocks free": ledger.free_blocks}
            self._note(request, "waits: no blocks for it", {**blocks, "blocks kept free": reserve})

    def paused(self, request: Request, num_tokens: int, ledger: BlockLedger) -> None:
        """It runs, and neither were blocks free for it nor could victims make room."""
        blocks = {"blocks needed": ledger.cost(request, num_tokens), "blocks free": ledger.free_blocks}
        self._note(request, "paused: no blocks for its tokens", blocks)

    def skipped(self, request: Request, budget: int) -> None:
        """Its quota was 0."""
        if not request.is_running:
            self._not_admitted = request
        needs = {"tokens to compute": self._view.uncomputed_tokens(request), "tokens left in the step": budget}
        self._note(request, "skipped: the policy gives it no tokens in this step", needs)

    def asked(self, victim: Request, candidates: Sequence[Request], needy: Request) -> None:
        """The policy picked a victim; whether it has to go isn't decided yet."""
        rule = self._policy.victim_rule or "the policy's own rule"
        names = ", ".join(request.id for request in candidates[:SHOWN_CANDIDATES])
        more = len(candidates) - SHOWN_CANDIDATES
        of = names + (f" and {more} more" if more > 0 else "")
        self._asked[victim.id] = (f"gives way to {needy.id}: {rule} picked it of {of}", tuple(candidates))

    def preempts(self, victims: Sequence[Request]) -> None:
        for victim in victims:
            why, candidates = self._asked[victim.id]
            for request in candidates[:SHOWN_CANDIDATES]:
                if request.id not in self._seen:
                    self._seen[request.id] = self._price(request)
            self._reasons[victim.id] = why
            self._seen[victim.id] = self._price(victim)

    def finish(self, tokens: Mapping[str, int], preempt: Sequence[Preemption], budget: int) -> SchedulePlan:
        """The plan with its reasons."""
        policy, view, last = self._policy, self._view, self._not_admitted
        if policy.rest:
            rest = policy.rest
        elif policy.wake_at is not None and not tokens:
            rest = f"the policy waits until {policy.wake_at:.6g} s"
        elif budget <= 0:
            rest = f"the step's budget of {view.max_num_batched_tokens} tokens is used up"
        elif policy.admission_closed and last is not None:
            rest = f"waits behind {last.id}, which could not be admitted"
        elif view.num_running >= view.max_num_seqs and not preempt:
            rest = "waits: no seat is free"
        else:
            rest = "the policy named nobody else"
        return SchedulePlan(tokens, preempt, self._reasons, self._seen, rest, policy.wake_at)

    def _note(self, request: Request, reason: str, facts: Mapping[str, Fact]) -> None:
        self._reasons[request.id] = reason
        self._seen[request.id] = {**self._facts(request), **facts}

    def _price(self, request: Request) -> dict[str, Fact]:
        """What its preemption would cost and bring."""
        return {
            **self._facts(request),
            "tokens computed": request.num_computed_tokens,
            "blocks freed": self._view.blocks_freed_by(request),
            "priority": request.priority,
            "output tokens to come": predicted_outputs_left(request),
        }

    def _facts(self, request: Request) -> Mapping[str, Fact]:
        facts = self._policy.explain(request, self._view)
        if not isinstance(facts, Mapping):
            raise self._policy._wrong("explain", facts, "a mapping of names to numbers or texts")
        return facts
