"""What a GPU's power limit costs: a device that has lately been busy with matrix products works more slowly.

The limit is kept on an average over tens of milliseconds, not step by step, so a step's time depends on those before.
Of the level, a running average of the tokens that go through the model a second, each kind of step has a line:

    level      L' = (rate - L) / window,   rate = (padded) tokens / seconds that the step takes rested; 0 in a pause
    longer by  slope max(0, L / threshold - 1),   L averaged over the step

Tokens a second stand for power: weights that are read once and multiplied by many tokens take most of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cost_model import StepTime
from .step_kind import StepKind


@dataclass(frozen=True)
class PowerLimit:
    """From which level on steps take longer, and by how much.

    Args:
        window: seconds of the running average.
        threshold: tokens a second from which on the limit is felt.
        slopes: kind -> share by which a step takes longer at twice the threshold; a kind that is left out never does.

    Raises:
        ValueError: a number that is not finite, a window or threshold <= 0, or a slope < 0.
    """

    window: float
    threshold: float
    slopes: Mapping[StepKind, float]

    def __post_init__(self) -> None:
        for name in ("window", "threshold"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} {getattr(self, name)!r} of the power limit: must be finite and > 0")
        for kind, slope in self.slopes.items():
            if not 0.0 <= slope < math.inf:
                raise ValueError(f"slope {slope!r} of {kind.value} under the power limit: must be finite and >= 0")

    def as_json(self) -> dict[str, Any]:
        slopes = {kind.value: slope for kind, slope in self.slopes.items()}
        return {"window": self.window, "threshold": self.threshold, "slopes": slopes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PowerLimit:
        """What `as_json` gave.

        Raises:
            ValueError, TypeError, KeyError: it is not that.
        """
        slopes = {StepKind(kind): float(slope) for kind, slope in data["slopes"].items()}
        return cls(float(data["window"]), float(data["threshold"]), slopes)


class PowerLevel:
    """The level of one device as time goes by.

    Attributes:
        level: tokens a second, averaged over the window.
    """

    __slots__ = ("_at", "_window", "level")

    def __init__(self, window: float) -> None:
        self._window, self._at, self.level = window, -math.inf, 0.0

    def during(self, begin: float, seconds: float, rate: float) -> float:
        """The mean level of a step, and on to its begin. Mutates: time passes until then, and the device rests in it.

        Args:
            begin: clock seconds, not before the end of the step before.
            seconds: of the step.
            rate: tokens a second.
        """
        if begin > self._at:
            self.level *= math.exp((self._at - begin) / self._window)
            self._at = begin
        if seconds <= 0.0:
            return self.level
        share = seconds / self._window
        return rate + (self.level - rate) * -math.expm1(-share) / share

    def pass_by(self, seconds: float, rate: float) -> None:
        """The step goes by. Mutates."""
        self.level = rate + (self.level - rate) * math.exp(-seconds / self._window)
        self._at += seconds


class PowerState:
    """How a device under a power limit takes the steps that it is given, one after the other."""

    __slots__ = ("_level", "_threshold")

    def __init__(self, limit: PowerLimit) -> None:
        self._threshold, self._level = limit.threshold, PowerLevel(limit.window)

    def seconds(self, time: StepTime, begin: float) -> float:
        """What the device takes for the next step. Mutates: it goes by.

        Args:
            time: of the step, on a rested device.
            begin: clock seconds, not before the end of the step before.
        """
        level = self._level
        excess = level.during(begin, time.device, time.rate) / self._threshold - 1.0
        seconds = time.device * (1.0 + time.slope * excess) if excess > 0.0 else time.device
        level.pass_by(seconds, time.rate)
        return seconds
