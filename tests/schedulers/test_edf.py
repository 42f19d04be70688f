"""edf: the earliest deadline first, and those without one last."""

from __future__ import annotations

import random

import pytest

from schedulers.edf import EDF
from tests.engine.shadow import ManualClock, drain, greedy, make_engine


def ends(engine):
    return [r.request_id for r in engine.records.requests]


def test_an_earlier_deadline_takes_the_seat_of_a_later_one_and_none_comes_last():
    engine = make_engine(EDF(), max_num_seqs=1)
    for name, deadline in (("never", None), ("late", 90.0), ("soon", 10.0), ("middle", 50.0)):
        engine.add_request(name, range(4), greedy(3), deadline=deadline)
        engine.step()
    drain(engine)
    assert ends(engine) == ["soon", "middle", "late", "never"]


def test_deadlines_that_can_be_met_are_met():
    """One seat, one token a second, free preemption: a set of jobs that some schedule serves in time, EDF does."""
    for seed in range(40):
        rng = random.Random(seed)
        busy: set[int] = set()
        jobs = []
        for _ in range(7):  # each job gets slots of its own, so that a schedule exists
            length, arrival = rng.randint(1, 5), rng.randint(0, 20)
            slots = [t for t in range(arrival, 100) if t not in busy][:length]
            busy.update(slots)
            jobs.append((arrival, length, float(slots[-1] + 1)))
        jobs.sort()
        clock = ManualClock()
        engine = make_engine(
            EDF(preemption="swap"),
            clock=clock, max_num_seqs=1, num_blocks=64, num_host_blocks=64, enable_prefix_caching=False,
        )  # fmt: skip
        requests = []
        while jobs or engine.has_unfinished:
            while jobs and jobs[0][0] <= clock.time:
                arrival, length, deadline = jobs.pop(0)
                name = str(len(requests))
                requests += engine.add_request(name, [1], greedy(length), arrival_time=arrival, deadline=deadline)
            engine.step()
            clock.time += 1.0
        assert all(r.finish_time + 1.0 <= r.deadline for r in requests)


@pytest.mark.parametrize("slo", [5.0, 20.0])
def test_a_default_slo_bounds_the_wait_of_those_without_a_deadline(slo):
    """A request with 3 s to its deadline comes in every second; only those with earlier deadlines go before."""
    clock = ManualClock()
    engine = make_engine(EDF(default_slo=slo), max_num_seqs=1, clock=clock)
    (patient,) = engine.add_request("patient", [1], greedy(1), arrival_time=0.0)
    for second in range(100):
        clock.time = float(second)
        engine.add_request(str(second), [2], greedy(1), arrival_time=clock.time, deadline=clock.time + 3.0)
        engine.step()
    assert slo - 3.0 - 1.0 <= patient.first_scheduled_time <= slo


def test_a_default_slo_that_is_no_time_is_refused():
    with pytest.raises(ValueError, match="default_slo = 0: must be seconds > 0"):
        EDF(default_slo=0)
