"""Every decision of a policy, compact, as JSON Lines; and a scheduler that takes the same decisions again.

A log's first line says what it is, then comes a line for every step that decided something:

    {"format": "research_engine.decisions", "version": 1, "policy": "FCFS"}
    {"step": 3, "now": 0.25, "tokens": [["a", 1], ["b", 12]], "preempt": [["c", "recompute", "made room for b"]],
     "reasons": {"d": "waits: no blocks for it"}, "seen": {"d": {"blocks needed": 4, "blocks free": 2}},
     "rest": "d could not be admitted, and nobody passes it"}

`tokens` is in the plan's order, which is the batch's; `reasons`, `seen` and `rest` are what the policy itself says: why
it chose or passed over a request, by which numbers, and why it looked at nobody else. `wake_at` is there when it chose
to wait. A step of which nothing is written neither computed nor preempted, and gave no reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from .contract import EngineView, Fact, Preemption, PreemptionMode, SchedulePlan, Scheduler

_FORMAT = {"format": "research_engine.decisions", "version": 1}


@dataclass(frozen=True)
class Decision:
    """What a policy decided in one step.

    Attributes:
        step: number of the step.
        now: clock seconds of the view that it saw.
        tokens: (request id, tokens) in the plan's order.
        preempt: in the plan's order, with reasons.
        reasons: request id -> why it was chosen or passed over.
        seen: request id -> name -> what the policy went by.
        rest: why nobody else was looked at.
        wake_at: clock seconds until which it chose to wait.
    """

    step: int
    now: float
    tokens: tuple[tuple[str, int], ...]
    preempt: tuple[Preemption, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    seen: dict[str, dict[str, Fact]] = field(default_factory=dict)
    rest: str = ""
    wake_at: float | None = None

    @property
    def plan(self) -> SchedulePlan:
        return SchedulePlan(dict(self.tokens), self.preempt, self.reasons, self.seen, self.rest, self.wake_at)


@dataclass
class DecisionLog:
    """Decisions in the order of their steps; give one to an engine (`Engine(..., decisions=DecisionLog())`).

    Attributes:
        policy: class of the scheduler that decided; the engine sets it.
    """

    policy: str = ""
    decisions: list[Decision] = field(default_factory=list)

    def add(self, step: int, now: float, plan: SchedulePlan) -> None:
        """Note a plan that the engine committed; one that does and says nothing leaves no trace."""
        if plan.tokens or plan.preempt or plan.reasons or plan.wake_at is not None:
            reasons = {str(name): str(why) for name, why in plan.reasons.items()}
            seen = {str(name): _plain(facts) for name, facts in plan.seen.items()}
            decided = tuple(plan.tokens.items()), tuple(plan.preempt)
            self.decisions.append(Decision(step, now, *decided, reasons, seen, plan.rest, plan.wake_at))

    def about(self, request_id: str) -> list[Decision]:
        """The decisions that name a request: it got tokens, was preempted, or a reason was given for it."""
        return [
            decision
            for decision in self.decisions
            if request_id in decision.reasons
            or any(name == request_id for name, _ in decision.tokens)
            or any(gone.request_id == request_id for gone in decision.preempt)
        ]

    def write(self, path: Path) -> None:
        """Write the log as JSON Lines, over what is there."""
        with path.open("w", encoding="utf-8") as file:
            for line in ({**_FORMAT, "policy": self.policy}, *map(_line_of, self.decisions)):
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, path: Path) -> DecisionLog:
        """The log that `write` wrote.

        Raises:
            ValueError: a line has another shape; names file, line and what is wrong.
        """
        number = 1
        try:
            with path.open(encoding="utf-8") as file:
                head = json.loads(file.readline())
                if not isinstance(head, dict) or any(head.get(key) != value for key, value in _FORMAT.items()):
                    raise ValueError(f"the first line must hold {json.dumps(_FORMAT)}")
                log = cls(head["policy"])
                for number, line in enumerate(file, 2):
                    log.decisions.append(_decision_of(json.loads(line)))
                    if number > 2 and log.decisions[-1].step <= log.decisions[-2].step:
                        raise ValueError(f"step {log.decisions[-1].step} comes after step {log.decisions[-2].step}")
        except (ValueError, KeyError, TypeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path}, line {number}: no decision log: {what}") from error
        return log


class ReplayScheduler(Scheduler):
    """Takes the decisions of a log again, step by step.

    The engine must be as it was: the same configuration, and the same requests under the same ids by the same steps, so
    a run on a clock of its own has to arrive as it did then. A decision that no longer fits, because a request isn't
    there or has not as many tokens, is a PlanError that names step and request.

    Args:
        decisions: of the run to repeat, in the order of their steps.
    """

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self._by_step = {decision.step: decision.plan for decision in decisions}

    def schedule(self, view: EngineView) -> SchedulePlan:
        return self._by_step.get(view.step) or SchedulePlan()


def _line_of(decision: Decision) -> dict[str, Any]:
    line: dict[str, Any] = {"step": decision.step, "now": decision.now, "tokens": decision.tokens}
    if decision.preempt:
        line["preempt"] = decision.preempt
    for name in ("reasons", "seen", "rest"):
        if getattr(decision, name):
            line[name] = getattr(decision, name)
    if decision.wake_at is not None:
        line["wake_at"] = decision.wake_at
    return line


def _decision_of(line: dict[str, Any]) -> Decision:
    preempt = []
    for request_id, mode, reason in line.get("preempt", ()):
        if mode not in get_args(PreemptionMode):
            raise ValueError(f"preemption mode {mode!r} must be one of {', '.join(get_args(PreemptionMode))}")
        preempt.append(Preemption(request_id, cast(PreemptionMode, mode), reason))
    tokens = tuple((str(name), int(count)) for name, count in line["tokens"])
    said = dict(line.get("reasons", {})), dict(line.get("seen", {})), str(line.get("rest", ""))
    return Decision(int(line["step"]), float(line["now"]), tokens, tuple(preempt), *said, line.get("wake_at"))


def _plain(facts: Any) -> dict[str, Fact]:
    """As JSON can hold it: integers and finite numbers stay, all else becomes text."""
    kept = {}
    for name, fact in dict(facts).items():
        number = isinstance(fact, int) or (isinstance(fact, float) and math.isfinite(fact))
        kept[str(name)] = fact if number else str(fact)
    return kept
