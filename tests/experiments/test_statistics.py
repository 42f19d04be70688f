"""Intervals, paired differences and counts: against scipy, by simulation, and at their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.analysis.statistics import (
    ENOUGH_SEEDS,
    bootstrap_interval,
    paired_change,
    sign_flip_p,
    values_needed,
)


def test_a_p99_needs_459_values() -> None:
    assert values_needed(99) == 459
    assert 1 - 0.99**459 >= 0.99 > 1 - 0.99**458
    assert values_needed(90) == 44


def test_an_interval_of_skewed_values_is_bca_and_not_symmetric() -> None:
    values = np.random.default_rng(0).exponential(1.0, 12).tolist()
    interval = bootstrap_interval(values)
    assert interval.high - interval.mean > interval.mean - interval.low


def test_values_all_alike_have_an_interval_of_no_width() -> None:
    assert bootstrap_interval([2.0] * 7) == (2.0, 2.0, 2.0)


def test_nan_values_are_left_out() -> None:
    assert bootstrap_interval([1.0, math.nan, 3.0]) == bootstrap_interval([1.0, 3.0])


def test_a_sign_flip_test_is_exact() -> None:
    assert sign_flip_p([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx(2 / 2**6)
    assert sign_flip_p([1.0] * 5) == pytest.approx(2 / 2**5)
    assert sign_flip_p([1.0, -1.0]) == 1.0
    assert sign_flip_p([0.0, 0.0, 0.0]) == 1.0
    assert math.isnan(sign_flip_p([1.0]))


def pairs(difference: float, seeds: int, noise: float = 1e-3) -> tuple[dict[int, float], dict[int, float]]:
    rng = np.random.default_rng(0)
    base = {seed: 10 + rng.normal() for seed in range(seeds)}  # seeds differ by far more than the two runs do
    return {seed: value + difference + noise * rng.normal() for seed, value in base.items()}, base


def test_a_small_difference_under_every_seed_is_real_though_seeds_differ_more() -> None:
    change = paired_change(*pairs(0.1, 8))
    assert change.verdict == "real"
    assert change.percent.mean == pytest.approx(1.0, rel=0.1)


def test_with_fewer_than_six_seeds_nothing_is_shown() -> None:
    assert ENOUGH_SEEDS == 6
    assert paired_change(*pairs(0.1, 5)).verdict == "too few seeds"
    assert paired_change(*pairs(0.1, 6)).verdict == "real"


def test_what_is_the_same_under_every_seed_is_no_difference_and_noise_is_not_shown() -> None:
    assert paired_change(dict.fromkeys(range(6), 1.0), dict.fromkeys(range(6), 1.0)).verdict == "none"
    both_ways = {seed: 10.0 + (-1) ** seed * (1 + seed) for seed in range(8)}
    assert paired_change(both_ways, dict.fromkeys(range(8), 10.0)).verdict == "not shown"
    assert paired_change({1: 2.0}, {2: 2.0}).verdict == "unknown"


def test_a_change_of_a_negative_baseline_keeps_its_sign() -> None:
    assert paired_change({0: -5.0, 1: -5.0}, {0: -10.0, 1: -10.0}).percent.mean == pytest.approx(50.0)


COUNTS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=9)


@given(COUNTS)
@settings(max_examples=40, deadline=None)
def test_no_count_falls_by_more_than_100_percent(pairs_of_counts: list[tuple[int, int]]) -> None:
    change = paired_change(*(dict(enumerate(map(float, side))) for side in zip(*pairs_of_counts, strict=True)))
    assert math.isnan(change.percent.mean) or change.percent.mean >= -100
    assert math.isnan(change.percent.low) or -100 <= change.percent.low <= change.percent.high < math.inf


def test_a_change_in_percent_of_a_baseline_that_may_be_0_has_no_bounds() -> None:
    change = paired_change({0: 0.0, 1: 1.0}, {0: 2.0, 1: 0.0})
    assert change.percent.mean == -50.0
    assert math.isnan(change.percent.low) and math.isnan(change.percent.high)
    assert change.difference == (-0.5, -2.0, 1.0)
    assert math.isnan(paired_change({0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.0}).percent.mean)
    assert paired_change({0: 0.0, 1: 0.0}, {0: 2.0, 1: 1.0}).percent == (-100.0, -100.0, -100.0)


@pytest.mark.filterwarnings("error")
def test_the_same_factor_under_every_seed_is_a_change_in_percent_without_spread() -> None:
    base = dict(enumerate([1.0, 2.0, 3.0, 4.0, 5.0, 7.0]))
    change = paired_change({seed: 1.1 * value for seed, value in base.items()}, base)
    assert change.percent == pytest.approx((10.0, 10.0, 10.0))
    assert change.difference.high > change.difference.low


def test_an_interval_of_a_ratio_covers_it_about_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(5), 0
    for _ in range(100):
        base = rng.lognormal(0, 0.5, 20)
        change = paired_change(dict(enumerate(base * rng.normal(0.8, 0.1, 20))), dict(enumerate(base)))
        hits += change.percent.low <= -20 <= change.percent.high
    assert 85 <= hits <= 99


def test_noise_alone_is_called_real_about_as_seldom_as_it_should_be() -> None:
    rng = np.random.default_rng(3)
    real = sum(
        paired_change(dict(enumerate(rng.normal(size=8))), dict(enumerate(rng.normal(size=8)))).verdict == "real"
        for _ in range(150)
    )
    assert real <= 15  # 5 % of 150 is 7.5


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=9))
@settings(max_examples=25, deadline=None)
def test_an_interval_lies_within_the_values_and_around_no_other_mean(values: list[float]) -> None:
    interval = bootstrap_interval(values)
    slack = 1e-9 * max(map(abs, values), default=0.0) + 1e-12
    assert min(values) - slack <= interval.low <= interval.high <= max(values) + slack
