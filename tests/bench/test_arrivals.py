"""When requests are due: the rate asked for, more or less bursty, the same for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from research_engine.bench.arrivals import arrival_times
from research_engine.bench.prompts import stream
from research_engine.bench.serve_options import TrafficOptions


def gaps(count=20_000, **options):
    times = arrival_times(TrafficOptions(**options), count, stream(3, "arrivals"))
    return np.diff([0.0, *times])


def test_without_a_rate_there_are_no_times():
    assert arrival_times(TrafficOptions(), 5, stream(0, "arrivals")) is None


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_gaps_are_of_a_gamma_distribution_whose_mean_is_the_rate(burstiness, variation):
    between = gaps(request_rate=5.0, burstiness=burstiness)
    assert between.mean() == pytest.approx(0.2)
    assert between.std() / between.mean() == pytest.approx(variation, abs=0.05)
    assert between.min() >= 0


def test_another_rate_stretches_the_same_pattern():
    assert gaps(50, request_rate=2.0) == pytest.approx(5 * gaps(50, request_rate=10.0))


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_a_ramp_goes_from_its_first_rate_to_its_last(strategy):
    between = gaps(ramp_up_strategy=strategy, ramp_up_start_rps=1.0, ramp_up_end_rps=16.0, burstiness=math.inf)
    assert (1 / between[0], 1 / between[-1]) == pytest.approx((1.0, 16.0))
    middle = 8.5 if strategy == "linear" else 4.0
    assert 1 / between[len(between) // 2] == pytest.approx(middle, rel=0.01)
