"""sjf: the fewest tokens to compute first, nobody preempted for it, and a bound on waiting."""

from __future__ import annotations

import random

import pytest

from schedulers.sjf import SJF
from tests.engine.shadow import ManualClock, drain, greedy, make_engine


def ends(engine):
    return [r.request_id for r in engine.records.requests]


def test_jobs_run_from_the_shortest_to_the_longest():
    """One seat, all there at once, random prompts, limits and predictions."""
    for seed in range(20):
        rng = random.Random(seed)
        engine = make_engine(SJF(ageing=0.0), max_num_seqs=1, num_blocks=40)
        sizes = {}
        for i in range(8):
            length, most, guess = rng.randint(1, 30), rng.randint(1, 30), rng.choice([None, rng.randint(1, 30)])
            prompt = [1000 * i + j for j in range(length)]
            engine.add_request(str(i), prompt, greedy(most), predicted_tokens=guess)
            sizes[str(i)] = length + (most if guess is None else min(guess, most))
        drain(engine)
        assert [sizes[name] for name in ends(engine)] == sorted(sizes.values())


def test_what_the_cache_holds_is_no_work():
    """The longer prompt goes first when all but its last tokens are cached; with window = 0 the cache is not asked."""
    order = []
    for window in (64, 0):
        engine = make_engine(SJF(window=window), max_num_seqs=1)
        engine.add_request("before", range(24), greedy(1))
        drain(engine)
        engine.add_request("cached", range(26), greedy(2))
        engine.add_request("new", range(100, 110), greedy(2))
        drain(engine)
        order.append(ends(engine))
    assert order == [["before", "cached", "new"], ["before", "new", "cached"]]


def test_a_running_job_is_not_preempted_by_a_shorter_one():
    engine = make_engine(SJF(), max_num_seqs=1)
    engine.add_request("long", range(4), greedy(20))
    engine.step()
    engine.add_request("short", [1], greedy(1))
    drain(engine)
    assert ends(engine) == ["long", "short"]


def wait_of_the_long_job(ageing: float, horizon: int = 200) -> float | None:
    """A job of 2 tokens arrives in every second and takes one; when is the job of 21 tokens first served?"""
    clock = ManualClock()
    engine = make_engine(SJF(ageing=ageing), max_num_seqs=1, clock=clock)
    (long,) = engine.add_request("long", range(20), greedy(1), arrival_time=0.0)
    for second in range(horizon):
        clock.time = float(second)
        engine.add_request(str(second), [100], greedy(1), arrival_time=float(second))
        engine.step()
        if long.first_scheduled_time is not None:
            return long.first_scheduled_time
    return None


@pytest.mark.parametrize("ageing", [0.25, 1.0, 4.0])
def test_only_those_that_arrive_within_size_over_ageing_go_before(ageing):
    """S8: the bound that the policy states; the stream's own size of 2 makes it a little tighter."""
    wait = wait_of_the_long_job(ageing)
    assert wait is not None and (21 - 2) / ageing - 1 <= wait <= 21 / ageing + 1


def test_without_ageing_the_long_job_starves():
    assert wait_of_the_long_job(0.0) is None


@pytest.mark.parametrize(("field", "value"), [("ageing", -1.0), ("window", -1), ("window", 1.5)])
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value}: must be"):
        SJF(**{field: value})
