"""prefix_aware: the longest cached prefix first, and a bound on waiting for the rest."""

from __future__ import annotations

import pytest

from schedulers.prefix_aware import PrefixAware
from tests.engine.shadow import ManualClock, drain, greedy, make_engine


def test_the_longest_cached_prefix_is_admitted_first():
    engine = make_engine(PrefixAware(), max_num_seqs=1)
    engine.add_request("before", range(24), greedy(1))
    drain(engine)
    for name, shared in (("none", 0), ("some", 8), ("most", 20)):
        engine.add_request(name, [*range(shared), *range(100, 124 - shared)], greedy(2))
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["before", "most", "some", "none"]


def test_more_of_the_prompts_is_found_in_the_cache_than_by_arrival():
    """Three families of prompts in turn, a cache that holds one family: what the policy is for."""
    import schedulers

    hits = {}
    for name in ("prefix_aware", "fcfs"):
        engine = make_engine(schedulers.create(name), max_num_seqs=1, num_blocks=8)
        for i in range(12):
            family = 1000 * (i % 3)
            engine.add_request(str(i), [*range(family, family + 20), 9000 + i], greedy(1))
        drain(engine)
        hits[name] = sum(r.cached_tokens for r in engine.records.requests)
    assert hits["fcfs"] == 0 and hits["prefix_aware"] == 9 * 20


def wait_without_a_hit(ageing: float, window: int = 128) -> float | None:
    """A request with 20 cached tokens comes in every second; when is the one with none first served?"""
    clock = ManualClock()
    engine = make_engine(PrefixAware(ageing=ageing, window=window), max_num_seqs=1, clock=clock)
    engine.add_request("before", range(24), greedy(1))
    drain(engine)
    (other,) = engine.add_request("other", range(100, 121), greedy(1), arrival_time=0.0)
    for second in range(100):
        clock.time = float(second)
        engine.add_request(str(second), range(21), greedy(1), arrival_time=clock.time)
        engine.step()
        if other.first_scheduled_time is not None:
            return other.first_scheduled_time
    return None


@pytest.mark.parametrize("ageing", [0.5, 2.0])
def test_only_those_that_arrive_within_the_prefix_over_ageing_go_before(ageing):
    """S8: 20 cached tokens are worth 20 / ageing seconds."""
    wait = wait_without_a_hit(ageing)
    assert wait is not None and 20 / ageing - 1 <= wait <= 20 / ageing + 1


def test_without_ageing_the_request_without_a_hit_starves():
    assert wait_without_a_hit(0.0) is None


def test_beyond_the_window_requests_follow_by_arrival():
    assert wait_without_a_hit(0.0, window=1) == 0.0


@pytest.mark.parametrize(("field", "value"), [("ageing", -1.0), ("window", 0)])
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value}: must be"):
        PrefixAware(**{field: value})
