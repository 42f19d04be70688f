"""Means over seeds with their uncertainty, and paired differences against a baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 10_000


class Interval(NamedTuple):
    """A mean and its confidence interval; NaN bounds where one value leaves none."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def bootstrap_interval(values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """Percentile bootstrap of the mean over seeds (Efron 1979); with two values it is their range.

    Args:
        values: one a seed; NaN ones are left out.
        confidence: of the interval, in (0, 1).
        seed: of the resampling, so that a table can be made again to the last digit.
    """
    array = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
    if not array.size:
        return Interval(math.nan, math.nan, math.nan)
    if array.size == 1:
        return Interval(float(array[0]), math.nan, math.nan)
    draws = np.random.default_rng(seed).integers(0, array.size, (RESAMPLES, array.size))
    tail = 50 * (1 - confidence)
    low, high = np.percentile(array[draws].mean(axis=1), [tail, 100 - tail])
    return Interval(float(array.mean()), float(low), float(high))


def paired_change(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval:
    """Change in percent of the baseline's mean: differences are taken seed by seed, then bootstrapped.

    Args:
        values, baseline: seed -> value; seeds that both have are used.
    """
    seeds = [seed for seed in values if seed in baseline and not math.isnan(values[seed] + baseline[seed])]
    reference = sum(baseline[seed] for seed in seeds) / len(seeds) if seeds else math.nan
    if not reference:
        return Interval(math.nan, math.nan, math.nan)
    difference = bootstrap_interval([values[seed] - baseline[seed] for seed in seeds])
    return Interval(*(100 * bound / reference for bound in difference))
