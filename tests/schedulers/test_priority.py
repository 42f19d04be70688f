"""priority: strictly higher preempts, equal never, and ageing bounds every wait."""

from __future__ import annotations

import math

import pytest

from research_engine.engine.contract import SchedulePlan
from schedulers.priority import Priority
from tests.engine.shadow import ManualClock, assert_empty, drain, expected, greedy, make_engine


def ends(engine):
    return [r.request_id for r in engine.records.requests]


def test_a_strictly_higher_priority_takes_the_only_seat():
    """S7: max_num_seqs = 1, low runs, high comes; low goes on where it was when high is done."""
    engine = make_engine(Priority(), max_num_seqs=1)
    (low,) = engine.add_request("low", range(6), greedy(8), priority=5)
    engine.step()
    engine.step()
    (high,) = engine.add_request("high", range(50, 56), greedy(3), priority=1)
    engine.step()
    assert high.is_running and low.status.value == "waiting"
    (gone,) = engine.records.steps[-1].preemptions
    assert (gone.request_id, gone.tokens_lost, gone.reason) == ("low", 7, "made room for high")
    drain(engine)
    assert ends(engine) == ["high", "low"]
    assert [r.output_token_ids for r in (low, high)] == [expected(r)[0] for r in (low, high)]


def test_an_equal_priority_never_takes_a_seat():
    """S7: two of equal priority; the first runs to its end."""
    engine = make_engine(Priority(), max_num_seqs=1)
    for name in ("first", "second"):
        engine.add_request(name, range(6), greedy(8), priority=3)
        engine.step()
    drain(engine)
    assert ends(engine) == ["first", "second"]
    assert not any(s.preemptions for s in engine.records.steps)


def test_an_equal_priority_takes_no_seat_even_if_it_arrived_earlier():
    """S7: its rank is better, yet preempting an equal would only trade one wait for another."""
    engine = make_engine(Priority(), max_num_seqs=1)
    for name, arrival in (("later", 5.0), ("earlier", 1.0)):
        engine.add_request(name, range(6), greedy(5), arrival_time=arrival)
        engine.step()
    drain(engine)
    assert ends(engine) == ["later", "earlier"]


def test_a_seat_is_taken_from_a_victim_whose_blocks_are_all_shared():
    """It frees no block, but the seat is what was needed: it is not spared."""
    engine = make_engine(Priority(), max_num_seqs=2)
    (shared,) = engine.add_request("shared", range(4), greedy(4), priority=9)
    engine.step()
    engine.add_request("holder", [*range(4), 8, 8], greedy(9), priority=5)
    engine.scheduler.order = lambda view: [r for r in view.waiting if r.id != "shared"]  # type: ignore[method-assign]
    engine.step()
    assert shared.is_running and engine.view().blocks_freed_by(shared) == 0
    del engine.scheduler.order
    engine.add_request("urgent", range(50, 54), greedy(2), priority=0)
    engine.step()
    assert [p.request_id for p in engine.records.steps[-1].preemptions] == ["shared"]
    assert "urgent" in engine.records.steps[-1].request_ids
    drain(engine)


def test_a_running_request_takes_no_blocks_from_one_more_urgent_that_had_to_pause():
    """The more urgent one needs more than there is and pauses; the next in rank pauses as well, rather than rob it."""
    policy = Priority(admission="chunk", watermark=0.0)
    engine = make_engine(policy, num_blocks=5, enable_prefix_caching=False)
    for level, (name, length) in enumerate({"top": 10, "high": 16, "low": 4}.items()):
        engine.add_request(name, range(length), greedy(2), priority=level)
    batch = engine.commit(SchedulePlan({"top": 10, "high": 4, "low": 4}), engine.view())
    engine.update(batch, engine.execute(batch))
    engine.step()
    assert engine.records.steps[-1].request_ids == ["top"] and not engine.records.steps[-1].preemptions
    drain(engine)
    assert_empty(engine)


def test_the_order_after_preemption_is_that_of_the_ranks():
    """S7: three levels, two seats; those preempted come back by rank, then by arrival."""
    engine = make_engine(Priority(ageing=math.inf), max_num_seqs=2, clock=ManualClock(0.01))
    requests = []
    for name, level in (("c1", 3), ("c2", 3), ("b1", 2), ("a1", 1), ("a2", 1), ("b2", 2)):
        requests += engine.add_request(name, range(4), greedy(4), priority=level)
        engine.step()
    assert {r.id for r in requests if r.num_preemptions} == {"c1", "c2", "b1"}
    drain(engine)
    by_admission = sorted(requests, key=lambda r: r.admitted_time)
    assert [r.id for r in by_admission] == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_the_lowest_of_the_running_gives_way():
    engine = make_engine(Priority(), max_num_seqs=3)
    for name, level in (("middle", 4), ("lowest", 9), ("high", 2)):
        engine.add_request(name, range(4), greedy(9), priority=level)
    engine.step()
    engine.add_request("urgent", range(4), greedy(2), priority=0)
    engine.step()
    assert [p.request_id for p in engine.records.steps[-1].preemptions] == ["lowest"]
    drain(engine)
    assert_empty(engine)


def test_an_equal_at_the_end_of_the_ranks_does_not_shield_one_of_lower_priority():
    """Ageing ranks a late urgent request below an old one of lower priority; only the latter may be preempted."""
    engine = make_engine(Priority(ageing=10.0), max_num_seqs=2)
    for name, arrival, level in (("lower", 16.0, 1), ("equal", 30.0, 0)):
        engine.add_request(name, range(4), greedy(9), arrival_time=arrival, priority=level)
        engine.step()
    engine.add_request("urgent", range(50, 54), greedy(2), arrival_time=20.0, priority=0)
    engine.step()
    assert [p.request_id for p in engine.records.steps[-1].preemptions] == ["lower"]
    drain(engine)


def wait_of_the_least_urgent(ageing: float, horizon: int) -> float | None:
    """A new urgent request in every second, each of which takes one; when is that of priority 10 first served?"""
    clock = ManualClock()
    engine = make_engine(Priority(ageing=ageing), max_num_seqs=1, clock=clock)
    (least,) = engine.add_request("least", [1], greedy(1), priority=10, arrival_time=0.0)
    for second in range(horizon):
        clock.time = float(second)
        engine.add_request(str(second), [2], greedy(1), priority=0, arrival_time=float(second))
        engine.step()
        if least.first_scheduled_time is not None:
            return least.first_scheduled_time
    return None


@pytest.mark.parametrize("ageing", [0.5, 2.0, 5.0])
def test_ageing_bounds_the_wait_under_a_steady_stream_of_urgent_requests(ageing):
    """S8: only those that arrive within ageing x (10 - 0) seconds can overtake it."""
    wait = wait_of_the_least_urgent(ageing, horizon=100)
    assert wait is not None and ageing * 10 - 1 <= wait <= ageing * 10 + 1


def test_without_ageing_the_least_urgent_starves():
    """S8, the other side: what ageing is for."""
    assert wait_of_the_least_urgent(math.inf, horizon=100) is None


def test_a_request_that_aged_past_a_higher_priority_is_not_preempted_by_it():
    """Its rank is better by then; preempting it would undo what ageing gave."""
    clock = ManualClock()
    engine = make_engine(Priority(ageing=1.0), max_num_seqs=1, clock=clock)
    engine.add_request("old", range(4), greedy(6), priority=3, arrival_time=0.0)
    engine.step()
    clock.time = 10.0
    engine.add_request("young", range(4), greedy(6), priority=0, arrival_time=10.0)
    engine.step()
    assert not engine.records.steps[-1].preemptions
    drain(engine)
    assert ends(engine) == ["old", "young"]


@pytest.mark.parametrize("value", [0, -1.0, math.nan])
def test_an_ageing_that_is_no_time_is_refused(value):
    with pytest.raises(ValueError, match=r"ageing = .*must be seconds > 0"):
        Priority(ageing=value)
