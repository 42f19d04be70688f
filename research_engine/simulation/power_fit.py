"""What a device's power limit costs, from served steps: how much longer they take than on a rested one, after what."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .fit import Sample
from .least_squares import solve
from .power import PowerLevel, PowerLimit, PowerState
from .profiled import ProfiledCost
from .step_kind import StepKind
from .timeline import TimedStep

WINDOWS = (0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4)
SHARES = tuple(0.1 + 0.05 * at for at in range(15))  # of the highest rate, to look for the threshold among
_FELT = 0.01  # share by which served steps have to take longer on average, or there is no limit to speak of
_BETTER = 0.9  # of what factors for each size leave unexplained: with a limit beside them it has to be less


def fit_power(
    steps: Sequence[TimedStep], samples: Sequence[Sample], counted: Sequence[bool], rested: ProfiledCost
) -> PowerLimit | None:
    """Window and threshold by search, slopes by least squares: one of decoding graphs, one of all other steps.

    Args:
        steps: of ordinary serving, one after the other.
        samples: the same; a device's time that was not seen is left out.
        counted: whether a step is fitted to; the others are still what happened before.
        rested: prices of a rested device, as designed batches tell them.

    Returns:
        None where the steps before do not tell by how much a step takes longer.
    """
    times = [rested.time_of(sample.work) for sample in samples]
    rates = [_rate(sample, time.device, rested) for sample, time in zip(samples, times, strict=True)]
    used = np.array([
        own and time.device > 0.0 and not math.isnan(sample.device)
        for own, sample, time in zip(counted, samples, times, strict=True)
    ])  # fmt: skip
    if not used.any():
        return None
    ratio = np.array([s.device / t.device if on else 1.0 for s, t, on in zip(samples, times, used, strict=True)])[used]
    placed = [rested.profile.ladders.placed(sample.work) for sample, on in zip(samples, used, strict=True) if on]
    decoding = np.array([kind is StepKind.DECODE_GRAPH for kind, _ in placed])
    best, found = math.inf, None
    for window in WINDOWS:
        levels = _levels(steps, samples, [time.device for time in times], rates, window)[used]
        for share in SHARES:
            threshold = share * max(rates)
            excess = np.maximum(0.0, levels / threshold - 1.0) ** 2
            rows = np.stack((excess * decoding, excess * ~decoding), axis=1)
            slopes = solve(rows, ratio - 1.0, np.ones(len(ratio)))
            error = float(np.abs(rows @ slopes - (ratio - 1.0)).mean())
            if error < best:
                best, found = error, (window, threshold, slopes, 1.0 + rows @ slopes)
    assert found is not None
    window, threshold, (decode, other), longer = found
    if longer.mean() < 1.0 + _FELT or _error_by_size(placed, ratio / longer) > _BETTER * _error_by_size(placed, ratio):
        return None
    return PowerLimit(
        window, threshold,
        {kind: float(decode if kind is StepKind.DECODE_GRAPH else other) for kind in StepKind},
    )  # fmt: skip


def rested_samples(steps: Sequence[TimedStep], samples: Sequence[Sample], cost: ProfiledCost) -> list[Sample]:
    """The same steps of ordinary serving, with the times that a rested device would have taken."""
    limit = cost.power_limit
    if limit is None:
        return list(samples)
    times = [cost.time_of(sample.work) for sample in samples]
    levels = _levels(steps, samples, [time.device for time in times], [time.rate for time in times], limit.window)
    longer = [
        1.0 + time.slope * max(0.0, float(level) / limit.threshold - 1.0) ** 2
        for time, level in zip(times, levels, strict=True)
    ]
    return [sample._replace(device=sample.device / own) for sample, own in zip(samples, longer, strict=True)]


def rested_alone(samples: Sequence[Sample], cost: ProfiledCost) -> list[Sample]:
    """Steps that each found the device rested: one that is long enough slows down within itself."""
    if cost.power_limit is None:
        return list(samples)
    made = []
    for sample in samples:
        time = cost.time_of(sample.work)
        longer = PowerState(cost.power_limit).seconds(time, 0.0) / time.device if time.device else 1.0
        made.append(sample._replace(device=sample.device / longer))
    return made


def _error_by_size(placed: Sequence[tuple[StepKind, int]], ratio: np.ndarray) -> float:
    """The mean error when each size of a graph takes longer by a factor of its own, and all launched steps by one."""
    sizes: dict[tuple[StepKind, int], list[float]] = {}
    for (kind, size), own in zip(placed, ratio, strict=True):
        sizes.setdefault((kind, 0 if kind is StepKind.LAUNCHED else size), []).append(float(own))
    errors = [np.abs(np.array(own) - np.median(own)).sum() for own in sizes.values()]
    return float(sum(errors) / len(ratio))


def _rate(sample: Sample, seconds: float, cost: ProfiledCost) -> float:
    """Tokens a second, padding included."""
    return cost.profile.ladders.placed(sample.work)[1] / seconds if seconds > 0.0 else 0.0


def _levels(
    steps: Sequence[TimedStep],
    samples: Sequence[Sample],
    rested: Sequence[float],
    rates: Sequence[float],
    window: float,
) -> np.ndarray:
    """The mean level during each step. Where the device's time was not seen, it ends with the step's tokens."""
    level, found, before = PowerLevel(window), [], -math.inf
    for step, sample, seconds, rate in zip(steps, samples, rested, rates, strict=True):
        own = sample.device if not math.isnan(sample.device) else min(seconds, max(0.0, step.executed - before))
        found.append(level.during(step.executed - own, own, rate))
        level.pass_by(own, rate)
        before = step.executed
    return np.array(found)
