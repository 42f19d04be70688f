"""Teacher-forced times: what a cost model says of every step of a recorded run, given when each of them began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .cost_model import Work
from .power import PowerState
from .profiled import ProfiledCost

_AWAY = 1.0  # a step's own time, by which its result may be later than foretold and the device still have ended it

_LAUNCHED = 1.5  # of the time that launching a step usually takes the host: by then it waits for the step before


class TimedStep(NamedTuple):
    """A step of a run; seconds on one clock.

    Attributes:
        work: what it asked of the device.
        started: when scheduling began.
        executed: when its tokens were out.
        finished: when its update had ended; without overlap, its end.
    """

    work: Work
    started: float
    executed: float
    finished: float


def step_times(steps: Sequence[TimedStep], cost: ProfiledCost, *, overlap: bool) -> tuple[np.ndarray, np.ndarray]:
    """Real and foretold seconds of consecutive steps [S].

    Without overlap a step takes finished - started. With overlap it takes as long as it keeps the tokens away: from the
    result before it, or from its own start where that came later, to its own result. That is foretold as the executor
    of simulated steps does it: the device begins when it has the step and is free of the one before, and the host looks
    for the result once it has handed over the next step.
    """
    times = [cost.time_of(step.work) for step in steps]
    power = None if cost.power_limit is None else PowerState(cost.power_limit)
    if not overlap:
        if power is not None:
            times = [
                time._replace(device=power.seconds(time, step.started + time.before))
                for step, time in zip(steps, times, strict=True)
            ]
        return np.array([s.finished - s.started for s in steps]), np.array([time.total for time in times])
    real, foretold = [], []
    result_before = free_at = device = -math.inf
    for index, (step, time) in enumerate(zip(steps, times, strict=True)):
        begin = max(step.started, result_before)
        launching = step.started + time.before
        away = result_before - free_at > _AWAY * device  # no step takes that long: the host came back late
        if (
            result_before > launching + _LAUNCHED * time.launch and not away
        ):  # waited for: the device was done at that moment
            free_at = result_before
        begins = max(min(free_at, result_before), launching)
        device = time.device if power is None else power.seconds(time, begins)
        free_at = max(launching + time.launch, begins + device)
        seen = max(free_at, begin)  # results are read in order
        if index + 1 < len(steps) and steps[index + 1].started < step.executed:
            own = times[index + 1]
            seen = max(seen, steps[index + 1].started + own.before + own.launch)
        real.append(step.executed - begin)
        foretold.append(seen - begin)
        result_before = step.executed
    return np.array(real), np.array(foretold)


def step_error(real: np.ndarray, foretold: np.ndarray) -> dict[str, float]:
    """How far foretold times [S] are from real ones.

    Returns:
        `steps`, and as shares of the step time `mape` (mean absolute error), `bias` (mean signed error) and
        `total_bias` (signed error of the summed time); NaN without steps.
    """
    if not len(real):
        return {"steps": 0, "mape": math.nan, "bias": math.nan, "total_bias": math.nan}
    errors = foretold / real - 1.0
    return {
        "steps": len(errors),
        "mape": float(np.abs(errors).mean()),
        "bias": float(errors.mean()),
        "total_bias": float(foretold.sum() / real.sum() - 1.0),
    }
