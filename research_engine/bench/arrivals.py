"""When the requests of a load are due: computed beforehand, in seconds after its start."""

from __future__ import annotations

import math

import numpy as np

from research_engine.bench.serve_options import TrafficOptions


def arrival_times(traffic: TrafficOptions, count: int, rng: np.random.Generator) -> list[float] | None:
    """Ascending times, the first gap counted from 0; None when there is no rate: all at once, or a closed loop.

    Gaps are of a Gamma distribution with shape `burstiness` (1: exponential, a Poisson process). They are stretched so
    that the last arrival is at count / rate, as vLLM's benchmark does it; a ramp is not.
    """
    if traffic.ramp_up_strategy is None and math.isinf(traffic.request_rate):
        return None
    if math.isinf(traffic.burstiness):
        gaps = np.ones(count)
    else:
        gaps = rng.gamma(traffic.burstiness, 1.0 / traffic.burstiness, count)
    if traffic.ramp_up_strategy is not None:
        times: list[float] = np.cumsum(gaps / ramp_rates(traffic, count)).tolist()
        return times
    ends = np.cumsum(gaps)
    if ends[-1] > 0:
        ends *= count / ends[-1]
    scaled: list[float] = (ends / traffic.request_rate).tolist()
    return scaled


def ramp_rates(traffic: TrafficOptions, count: int) -> np.ndarray:
    """Requests a second at each request of a ramp, `[count]`."""
    start, end = traffic.ramp_up_start_rps, traffic.ramp_up_end_rps
    assert start is not None and end is not None
    progress = np.arange(count) / max(1, count - 1)
    if traffic.ramp_up_strategy == "exponential":
        return start * (end / start) ** progress
    return start + (end - start) * progress
