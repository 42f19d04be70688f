"""What the host adds to a step: scheduling, handing over, and what it does once the tokens are out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .cost_model import Work
from .step_kind import StepKind


@dataclass(frozen=True)
class HostCost:
    """Linear in what the host counts through, since it does so in Python.

    Args:
        schedule: (a, b): a + b rows seconds, from the start of a step until its plan is committed.
        handover: kind -> (a, b, c): a + b rows + c tokens seconds, from there until the device has all of it; a kind
            that is left out takes no time.
        launch: seconds of the handover of a launched step during which the device is at work on it already.
        after: (a, b): a + b tokens drawn seconds, from the moment they are out until the next step starts.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    schedule: tuple[float, float] = (0.0, 0.0)
    handover: Mapping[StepKind, tuple[float, float, float]] = field(default_factory=dict)
    launch: float = 0.0
    after: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        numbers = [*self.schedule, *self.after, self.launch, *(x for own in self.handover.values() for x in own)]
        for value in numbers:
            if not 0.0 <= value < math.inf:
                raise ValueError(f"host time {value!r}: must be finite seconds >= 0")

    def seconds(self, kind: StepKind, work: Work) -> tuple[float, float, float]:
        """Before the device can begin, while it works already, and after the tokens are out."""
        a, b = self.schedule
        before = a + b * work.sequences
        launch = 0.0
        handover = self.handover.get(kind)
        if handover is not None:
            a, b, c = handover
            seconds = a + b * work.sequences + c * work.tokens
            if kind is StepKind.LAUNCHED:
                launch = min(self.launch, seconds)
            before += seconds - launch
        a, b = self.after
        return before, launch, a + b * work.draws

    def as_json(self) -> dict[str, Any]:
        handover = {kind.value: list(numbers) for kind, numbers in self.handover.items()}
        return {"schedule": self.schedule, "handover": handover, "launch": self.launch, "after": self.after}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HostCost:
        """What `as_json` gave.

        Raises:
            ValueError, TypeError, KeyError: it is not that.
        """
        handover = {}
        for kind, numbers in data["handover"].items():
            a, b, c = map(float, numbers)
            handover[StepKind(kind)] = (a, b, c)
        (s0, s1), (t0, t1) = (map(float, data[name]) for name in ("schedule", "after"))
        return cls((s0, s1), handover, float(data["launch"]), (t0, t1))


NO_HOST = HostCost()
