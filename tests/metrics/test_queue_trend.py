"""Whether a system keeps up, from the requests alone: growth is arrivals less what is served."""

from __future__ import annotations

import pytest

from research_engine.engine.records import RequestRecord
from research_engine.metrics import queue_trend


def served(arrivals: list[float], ends: list[float | None], service: float = 0.1) -> list[RequestRecord]:
    return [
        RequestRecord(
            str(i), "", 0, arrival, None if end is None else end - service, end, end, end, "length", 1, 1, 1, 0, 0, 0
        )
        for i, (arrival, end) in enumerate(zip(arrivals, ends, strict=True))
    ]


def line(count: int, rate: float, service: float) -> list[RequestRecord]:
    """Arrivals at equal gaps, served one after the other."""
    free, ends = 0.0, []
    arrivals = [i / rate for i in range(count)]
    for arrival in arrivals:
        free = max(free, arrival) + service
        ends.append(free)
    return served(arrivals, ends, service)


def test_beyond_capacity_the_queue_grows_by_what_is_not_served():
    trend = queue_trend(line(400, rate=10.0, service=0.125))  # 10 a second come, 8 are served
    assert trend.grows
    assert trend.growth == pytest.approx(2.0, rel=0.05)


def test_below_capacity_it_does_not_grow():
    trend = queue_trend(line(400, rate=10.0, service=0.09))
    assert not trend.grows
    assert trend.growth == pytest.approx(0.0, abs=0.01)


def test_a_refused_request_is_never_in_the_system():
    requests = line(40, rate=10.0, service=0.09)
    assert queue_trend([*requests, *served([1.0] * 50, [None] * 50)]) == queue_trend(requests)


@pytest.mark.parametrize("requests", [[], line(7, 10.0, 0.5), served([0.0] * 20, [float(i) for i in range(20)])])
def test_too_few_or_all_at_once_tell_nothing(requests):
    assert queue_trend(requests) == (False, 0.0)


def test_a_system_that_is_still_filling_is_not_called_unstable():
    """Eight requests a second that take ten seconds each: over eleven seconds their number must rise."""
    arrivals = [i / 8 for i in range(88)]
    assert queue_trend(served(arrivals, [a + 10.0 for a in arrivals], service=10.0)) == (False, 0.0)
    longer = [i / 8 for i in range(800)]
    assert not queue_trend(served(longer, [a + 10.0 for a in longer], service=10.0)).grows
