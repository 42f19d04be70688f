"""srpt: a shorter job takes the place of a longer one, and no policy has a lower mean time to completion."""

from __future__ import annotations

import random

import pytest

import schedulers
from schedulers.srpt import SRPT
from tests.engine.shadow import ManualClock, drain, expected, greedy, make_engine


def total_time(name: str, seed: int) -> float:
    """Sum of completion times less arrivals: one seat, one token a second, preemption (by swap) for nothing."""
    rng = random.Random(seed)
    jobs = sorted((rng.randint(0, 30), rng.randint(1, 12)) for _ in range(8))
    parameters = {"ageing": 0.0} if name in ("srpt", "sjf") else {}
    clock = ManualClock()
    engine = make_engine(
        schedulers.create(name, preemption="swap", **parameters),
        clock=clock, max_num_seqs=1, num_blocks=64, num_host_blocks=64, enable_prefix_caching=False,
    )  # fmt: skip
    while jobs or engine.has_unfinished:
        while jobs and jobs[0][0] <= clock.time:
            arrival, length = jobs.pop(0)
            engine.add_request(f"{arrival} {length} {len(jobs)}", [1], greedy(length), arrival_time=float(arrival))
        engine.step()
        clock.time += 1.0
    return sum(r.finish_time - r.arrival_time + 1.0 for r in engine.records.requests)


@pytest.mark.parametrize("other", ["fcfs", "sjf", "mlfq", "edf", "vtc"])
def test_no_policy_completes_jobs_sooner_on_average(other):
    """Schrage's theorem, on random arrivals and lengths that are known."""
    pairs = [(total_time("srpt", seed), total_time(other, seed)) for seed in range(25)]
    assert all(own <= others for own, others in pairs)
    assert any(own < others for own, others in pairs)


def test_a_shorter_job_takes_the_only_seat_and_a_longer_one_does_not():
    engine = make_engine(SRPT(), max_num_seqs=1)
    (middle,) = engine.add_request("middle", range(4), greedy(20), predicted_tokens=10)
    engine.step()
    engine.add_request("longer", range(30, 34), greedy(20), predicted_tokens=15)
    engine.step()
    assert middle.is_running
    engine.add_request("shorter", range(60, 64), greedy(3), predicted_tokens=3)
    engine.step()
    assert [p.request_id for p in engine.records.steps[-1].preemptions] == ["middle"]
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["shorter", "middle", "longer"]
    assert middle.output_token_ids == expected(middle)[0]


def test_a_long_job_that_is_nearly_done_keeps_its_seat():
    """What counts is what is left, not what it was."""
    engine = make_engine(SRPT(), max_num_seqs=1)
    engine.add_request("long", range(4), greedy(12))
    for _ in range(10):
        engine.step()
    engine.add_request("short", range(60, 64), greedy(4))
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["long", "short"]


def test_a_cached_prompt_brings_a_job_forward_but_takes_no_seat_from_a_shorter_answer():
    """What is cached comes and goes, so it decides the order alone, not who gives way."""
    engine = make_engine(SRPT(), max_num_seqs=1, max_num_batched_tokens=4)
    engine.add_request("before", range(20), greedy(1))
    drain(engine)
    engine.add_request("runs", range(100, 124), greedy(5))
    engine.step()
    engine.add_request("cached", range(21), greedy(12))
    policy = engine.scheduler
    assert next(iter(policy.order(engine.view()))).id == "cached"
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["before", "runs", "cached"]
