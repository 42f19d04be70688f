"""When a run may not be believed: the load came late, or the queue grew."""

from __future__ import annotations

import math

from research_engine import metrics
from research_engine.engine.records import Records
from tests.metrics.test_latency import request, step


def test_a_request_that_enters_as_the_step_in_progress_ends_is_on_time() -> None:
    rates = metrics.arrival_rates([0.0, 5.0, 10.0], [0.0, 6.0, 10.0], [(4.0, 6.0)])
    assert rates == (0.2, 0.2)
    assert not rates.is_void


def test_a_load_generator_more_than_one_percent_late_voids_the_run() -> None:
    arrivals = [0.0, 5.0, 10.0]
    assert not metrics.arrival_rates(arrivals, [0.0, 5.0, 10.09], []).is_void
    assert metrics.arrival_rates(arrivals, [0.0, 5.0, 10.2], []).is_void


def test_refused_requests_void_the_run() -> None:
    rates = metrics.arrival_rates([0.0, 1.0, 2.0], [0.0, None, 2.0], [])
    assert rates == (1.0, 0.5)
    assert rates.is_void


def test_a_batch_at_once_has_no_rate_and_is_not_void() -> None:
    rates = metrics.arrival_rates([1.0, 1.0], [1.0, 1.0], [])
    assert rates.offered == math.inf
    assert not rates.is_void


def run_with_queue(lengths: list[int]) -> Records:
    """One arrival and one step a second; the step sees that many requests."""
    records = Records([step(at + 0.5, {}, num_running=1, num_waiting=n - 1) for at, n in enumerate(lengths)])
    records.requests += [request(f"r{at}", float(at), (float(at + 1),)) for at in range(len(lengths))]
    return records


def test_a_queue_that_grows_to_the_end_is_unstable() -> None:
    assert metrics.queue_grows(run_with_queue(list(range(1, 17))))


def test_a_queue_that_drains_or_stands_is_stable() -> None:
    assert not metrics.queue_grows(run_with_queue([4] * 16))
    assert not metrics.queue_grows(run_with_queue([1, 3, 5, 7, 9, 9, 9, 9, 7, 5, 3, 3, 1, 1, 1, 1]))


def test_a_start_from_nothing_to_a_level_is_stable() -> None:
    assert not metrics.queue_grows(run_with_queue([1, 2, 3, 4] + [4, 5, 4, 5] * 2 + [5, 5, 5, 4]))
