"""slo_aware: the next token that is due soonest; who is ahead of the reader gives way."""

from __future__ import annotations

import pytest

from schedulers.slo_aware import SLOAware
from tests.engine.shadow import ManualClock, drain, greedy, make_engine


def test_a_request_ahead_of_its_reader_gives_its_seat_to_one_that_waits():
    """One seat; the first draws ten tokens a reader's second, so the second does not wait for its end."""
    clock = ManualClock()
    policy = SLOAware(ttft=1.0, tpot=1.0, lead=3.0)
    engine = make_engine(policy, max_num_seqs=1, num_host_blocks=16, clock=clock)
    (first,) = engine.add_request("first", range(4), greedy(30), arrival_time=0.0)
    (second,) = engine.add_request("second", range(50, 54), greedy(30), arrival_time=0.0)
    while not second.num_output_tokens:
        clock.time += 0.1
        engine.step()
    assert first.num_output_tokens == 3, "it is due 3 s after the other from its third token on"
    drain(engine)


def test_both_readers_are_served_in_time_where_first_come_first_served_fails_one():
    """Two readers at a token a second and one seat that makes ten: no token comes late, as QoE = 1 asks for."""
    clock = ManualClock()
    policy = SLOAware(ttft=2.0, tpot=1.0, lead=2.0, preemption="swap")
    engine = make_engine(policy, max_num_seqs=1, num_host_blocks=16, clock=clock)
    requests = [
        engine.add_request(name, range(base, base + 4), greedy(20), arrival_time=0.0)[0]
        for name, base in (("a", 0), ("b", 50))
    ]
    late = []
    while engine.has_unfinished:
        due = {request: policy.due(request) for request in requests}
        clock.time += 0.1
        late += [output for output in engine.step() if clock.time > due[output.request] + 1e-9]
    assert not late


def test_the_soonest_due_goes_first_when_the_budget_is_short(rows):
    engine = make_engine(SLOAware(ttft=1.0, tpot=1.0), max_num_batched_tokens=1)
    engine.add_request("a", [1], greedy(3), arrival_time=0.0)
    engine.add_request("b", [2], greedy(3), arrival_time=0.5)
    drain(engine)
    assert [next(iter(step)) for step in rows(engine)] == ["a", "b", "a", "b", "a", "b"]


def test_nobody_who_arrives_later_is_served_before_a_request_without_a_token():
    """S8: a new request comes in every second and takes one; the wait does not grow beyond the queue before it."""
    clock = ManualClock()
    engine = make_engine(SLOAware(), max_num_seqs=1, clock=clock)
    requests = []
    for second in range(60):
        clock.time = float(second)
        requests += engine.add_request(str(second), [second], greedy(1), arrival_time=clock.time)
        requests += engine.add_request(f"long {second}", range(20), greedy(2), arrival_time=clock.time)
        engine.step()
    drain(engine)
    times = [r.first_scheduled_time for r in requests]
    assert times == sorted(times)


@pytest.mark.parametrize("field", ["ttft", "tpot", "lead"])
def test_parameters_out_of_range_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} = -1: must be seconds >= 0"):
        SLOAware(**{field: -1})
