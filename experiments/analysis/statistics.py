"""Means over seeds with their uncertainty, paired differences, and what a count of values supports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 9_999
_ALIKE = 1e-9  # percent; ratios no further apart are one, and differ by rounding
ENOUGH_SEEDS = 6
"""Fewest seeds under which a paired difference can be shown: if all n differences have one sign, an exact sign-flip
test still gives p = 2 / 2^n, and that is below 0.05 from n = 6 on."""


class Interval(NamedTuple):
    """A mean and its confidence interval; NaN bounds where one value leaves none."""

    mean: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


UNKNOWN = Interval(math.nan, math.nan, math.nan)


class Change(NamedTuple):
    """A paired difference against a baseline.

    Attributes:
        difference: of the means, in the metric's unit.
        percent: the ratio of the means less one, in percent, and the interval of that ratio; see `paired_change`.
        p: of an exact sign-flip test (Fisher 1935) of the differences; NaN below two seeds.
        seeds: that both have.
    """

    difference: Interval
    percent: Interval
    p: float
    seeds: int

    @property
    def verdict(self) -> str:
        """`real`: the interval excludes 0 and p < 0.05. `not shown`: enough seeds, but not so. `too few seeds`. `none`:
        no difference under any seed. `unknown`: no seed has both.
        """
        if not self.seeds or math.isnan(self.difference.mean):
            return "unknown"
        if self.difference == (0.0, 0.0, 0.0):
            return "none"
        if self.seeds < ENOUGH_SEEDS:
            return "too few seeds"
        excludes_zero = self.difference.low > 0 or self.difference.high < 0
        return "real" if excludes_zero and self.p < 1 - CONFIDENCE else "not shown"


NO_CHANGE = Change(UNKNOWN, UNKNOWN, math.nan, 0)


def bootstrap_interval(values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """BCa bootstrap of the mean (Efron 1987); with two values it is their range.

    Args:
        values: one a seed; NaN ones are left out.
        confidence: of the interval, in (0, 1).
        seed: of the resampling, so that a table can be made again to the last digit.
    """
    return _interval(tuple(value for value in values if not math.isnan(value)), confidence, seed)


@lru_cache(maxsize=4096)
def _interval(values: tuple[float, ...], confidence: float, seed: int) -> Interval:
    from scipy import stats

    if not values:
        return UNKNOWN
    mean = math.fsum(values) / len(values)
    if len(values) == 1 or not math.isfinite(mean):
        return Interval(mean, math.nan, math.nan)
    low, high = min(values), max(values)
    if len(values) > 2 and low < high:
        rng = np.random.default_rng(seed)
        found = stats.bootstrap((np.array(values),), np.mean, vectorized=True, n_resamples=RESAMPLES, rng=rng,
                                confidence_level=confidence, method="BCa").confidence_interval  # fmt: skip
        if math.isfinite(found.low) and math.isfinite(found.high):
            low, high = float(found.low), float(found.high)
    return Interval(mean, low, high)


def paired_change(values: Mapping[int, float], baseline: Mapping[int, float]) -> Change:
    """Differences are taken seed by seed, then bootstrapped, so that what a seed does to both drops out.

    In percent it is the ratio of the means that is bootstrapped: seeds are drawn, each with both its values, so that
    the baseline's mean varies with the draw and what cannot be negative cannot fall by more than 100 %. The mean is NaN
    where the baseline's is 0. The bounds are NaN where the baseline's own interval reaches 0: a ratio to what may be 0
    has no bounds (Fieller 1954).

    Args:
        values, baseline: seed -> value; seeds that both have are used.
    """
    seeds = [seed for seed in values if seed in baseline and not math.isnan(values[seed] + baseline[seed])]
    differences = [values[seed] - baseline[seed] for seed in seeds]
    if not seeds:
        return NO_CHANGE
    difference = bootstrap_interval(differences)
    percent = _percent_interval(tuple(values[seed] for seed in seeds), tuple(baseline[seed] for seed in seeds))
    return Change(difference, percent, sign_flip_p(differences), len(seeds))


@lru_cache(maxsize=4096)
def _percent_interval(values: tuple[float, ...], baseline: tuple[float, ...]) -> Interval:
    """Of 100 (mean of values / mean of baseline - 1), by seeds; with two seeds the range of the two ratios."""
    from scipy import stats

    def change(one: Any, other: Any, axis: int = -1) -> Any:
        reference = np.mean(other, axis=axis)
        difference = np.mean(one, axis=axis) - reference
        return 100 * np.where(difference == 0, 0.0, difference / np.abs(reference))  # from 0 to 0 is no change

    reference = bootstrap_interval(baseline)
    if not reference.mean or not math.isfinite(reference.mean):
        return UNKNOWN
    after, before = np.array(values), np.array(baseline)
    mean = float(change(after, before))
    if not reference.low * reference.high > 0:  # 0 is within, or there is no interval
        return Interval(mean, math.nan, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):  # a few draws may have a baseline of 0: infinitely more
        ratios = change(after[:, None], before[:, None])
        low, high = float(ratios.min()), float(ratios.max())
        if len(values) > 2 and high - low > _ALIKE:
            found = stats.bootstrap(
                (after, before), change, paired=True, vectorized=True, n_resamples=RESAMPLES,
                confidence_level=CONFIDENCE, method="BCa", rng=np.random.default_rng(0),
            ).confidence_interval  # fmt: skip
            if math.isfinite(found.low) and math.isfinite(found.high):
                low, high = float(found.low), float(found.high)
    return Interval(mean, low, high) if math.isfinite(high - low) else Interval(mean, math.nan, math.nan)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a mean of 0 if each difference could as well have had the other sign; exact up to 13 of them."""
    return _sign_flip_p(tuple(differences))


@lru_cache(maxsize=4096)
def _sign_flip_p(differences: tuple[float, ...]) -> float:
    from scipy import stats

    if len(differences) < 2:
        return math.nan
    if not any(differences):
        return 1.0
    result = stats.permutation_test((np.array(differences),), np.mean, permutation_type="samples", vectorized=True,
                                    n_resamples=RESAMPLES, rng=np.random.default_rng(0))  # fmt: skip
    return float(result.pvalue)


def values_needed(percentile: float, confidence: float = 0.99) -> int:
    """Fewest values that support a percentile: so many that, with the given confidence, one of them lies beyond it.

    A value lies at or below the true percentile p with probability p/100, all n of them with (p/100)^n. Only when that
    is at most 1 - confidence has the sample most likely seen anything of the tail that the percentile is about: n >=
    ln(1 - confidence) / ln(p/100). For the 99th percentile and 99 % that is ln 0.01 / ln 0.99 = 458.2, so 459 (the
    count that MLPerf's early stopping asks for at no violation).

    Args:
        percentile: in (0, 100).
        confidence: in (0, 1).
    """
    return math.ceil(math.log(1 - confidence) / math.log(percentile / 100))
