"""What a GPU's power limit costs: a device that has lately been busy with matrix products works more slowly.

The limit is kept on an average over tens of milliseconds, not step by step, so a step's time depends on those before.
Of the level, a running average of the tokens that go through the model a second, each kind of step has a line:

    level      L' = (rate - L) / window,   rate = (padded) tokens / seconds that the step takes rested; 0 in a pause
    longer by  slope max(0, L / threshold - 1)^2,   L averaged over the step

Tokens a second stand for power: weights that are read once and multiplied by many tokens take most of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from research_engine.plugins import nearest_first

from .cost_model import StepTime
from .step_kind import StepKind

# With numbers beyond these no device was ever measured, and a step's time may overflow.
_WINDOWS, _THRESHOLDS, _SLOPES = (1e-4, 3600.0), (1e-3, 1e12), (0.0, 1000.0)


@dataclass(frozen=True)
class PowerLimit:
    """From which level on steps take longer, and by how much.

    Args:
        window: seconds of the running average.
        threshold: tokens a second from which on the limit is felt.
        slopes: kind -> share by which a step takes longer at twice the threshold; a kind that is left out never does.

    Raises:
        ValueError: something that is no number, a window beyond 0.1 ms to an hour, a threshold beyond 0.001 to 1e12, or
            a slope beyond 0 to 1000; named as in a profile.
    """

    window: float
    threshold: float
    slopes: Mapping[StepKind, float]

    def __post_init__(self) -> None:
        _check("window", self.window, "seconds", _WINDOWS)
        _check("threshold", self.threshold, "tokens a second", _THRESHOLDS)
        for kind, slope in self.slopes.items():
            _check(f"slopes[{kind.value!r}]", slope, "a share", _SLOPES)

    def as_json(self) -> dict[str, Any]:
        slopes = {kind.value: slope for kind, slope in self.slopes.items()}
        return {"window": self.window, "threshold": self.threshold, "slopes": slopes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PowerLimit:
        """What `as_json` gave.

        Raises:
            ValueError: it is not that; names the key, its value and the rule.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"power = {data!r}: must hold window, threshold and slopes")
        for key in ("window", "threshold", "slopes"):
            if key not in data:
                raise ValueError(f"power.{key}: is not there")
        slopes = data["slopes"]
        if not isinstance(slopes, Mapping):
            raise ValueError(f"power.slopes = {slopes!r}: must map kinds of steps to shares")
        kinds = {kind.value: kind for kind in StepKind}
        for kind in slopes:
            if kind not in kinds:
                raise ValueError(f"power.slopes: no kind of steps {kind!r}; {nearest_first(kind, kinds)}")
        return cls(data["window"], data["threshold"], {kinds[kind]: slope for kind, slope in slopes.items()})


def _check(key: str, value: Any, unit: str, bounds: tuple[float, float]) -> None:
    """Raises ValueError: it is no number between the bounds."""
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"power.{key} = {value!r}: must be {unit}, a number from {low:g} to {high:g}")


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
        seconds = time.device * (1.0 + time.slope * excess * excess) if excess > 0.0 else time.device
        level.pass_by(seconds, time.rate)
        return seconds
