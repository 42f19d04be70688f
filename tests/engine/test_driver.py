"""Replay is open loop: arrivals come when they are scheduled, however far behind the engine is."""

from __future__ import annotations

import pytest

from research_engine.engine.clock import MonotonicClock
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.errors import PolicyError
from schedulers.fcfs import FCFS

from .shadow import ManualClock, greedy, make_engine


def engine_with_steps_of(seconds: float, **sizes):
    """Each step takes so long on a clock that only steps and sleeping move."""
    clock = ManualClock()
    engine = make_engine(FCFS(), clock=clock, **sizes)
    engine.executor.before = lambda batch: clock.sleep_until(clock.time + seconds)  # type: ignore[attr-defined]
    return engine


def test_latency_counts_from_the_scheduled_arrival_of_a_request_added_late():
    """One seat, steps of a second: the second request arrives in the middle of a step and is added after it."""
    engine = engine_with_steps_of(1.0, max_num_seqs=1)
    report = replay(engine, [Arrival(0.0, "a", [1], greedy(3)), Arrival(0.25, "b", [2], greedy(1))])
    a, b = engine.records.requests
    assert (a.finish_time, b.arrival_time, b.first_scheduled_time, b.finish_time) == (3.0, 0.25, 3.0, 4.0)
    assert report.worst_lag == 0.75 and report.entered == {"a": 0.0, "b": 1.0} and report.end == 4.0


def test_the_clock_is_slept_to_the_next_arrival_when_nothing_is_to_do():
    engine = engine_with_steps_of(1.0)
    report = replay(engine, [Arrival(7.5, "late", [1], greedy(1)), Arrival(2.0, "early", [1], greedy(1))])
    assert [(s.started, s.executed) for s in engine.records.steps] == [(2.0, 3.0), (7.5, 8.5)]
    assert report.worst_lag == 0.0


def test_a_replay_starts_at_the_clocks_present_time():
    """Arrival times and deadlines count from the replay's start."""
    engine = engine_with_steps_of(1.0)
    engine.clock.sleep_until(100.0)
    seen = []
    engine.scheduler.on_arrival = seen.append  # type: ignore[method-assign]
    replay(engine, [Arrival(2.0, "r", [1], greedy(1), priority=3, client="c", deadline=9.0, predicted_tokens=5)])
    (request,) = seen
    assert (request.arrival_time, request.deadline) == (102.0, 109.0)
    assert (request.priority, request.client, request.predicted_tokens) == (3, "c", 5)


def test_a_refused_request_is_recorded_and_the_replay_goes_on():
    """Too long, a duplicate of a live id, an empty prompt: each with its reason; the rest is served."""
    engine = engine_with_steps_of(1.0, num_blocks=4)
    arrivals = [
        Arrival(0.0, "long", range(40), greedy(1), client="c", priority=2),
        Arrival(0.0, "r", [1], greedy(5)),
        Arrival(0.5, "r", [1], greedy(5)),
        Arrival(1.0, "empty", [], greedy(1)),
        Arrival(1.5, "last", [1], greedy(1)),
    ]
    report = replay(engine, arrivals)
    assert set(report.refused) == {"long", "r", "empty"}
    assert "16 (4 blocks of 4)" in report.refused["long"] and "is live" in report.refused["r"]
    refused = [r for r in engine.records.requests if r.finish_reason == "refused"]
    assert [(r.request_id, r.arrival_time) for r in refused] == [("long", 0.0), ("r", 0.5), ("empty", 1.0)]
    assert (refused[0].client, refused[0].priority, refused[0].prompt_tokens) == ("c", 2, 40)
    assert refused[0].first_scheduled_time is None and refused[0].output_tokens == 0
    served = {r.request_id: r.output_tokens for r in engine.records.requests if r.finish_reason == "length"}
    assert served == {"r": 5, "last": 1}


def test_outputs_of_every_step_are_shown():
    engine, seen = engine_with_steps_of(1.0), []
    replay(engine, [Arrival(0.0, "r", [1], greedy(3))], on_outputs=seen.append)
    assert [[output.token_id for output in outputs] for outputs in seen] == [
        [token_id] for token_id in seen[0][0].request.output_token_ids
    ]


def test_a_failing_policy_ends_the_replay_and_leaves_what_was_recorded():
    class Fails(FCFS):
        def schedule(self, view):
            if view.step == 2:
                raise ZeroDivisionError
            return super().schedule(view)

    engine = make_engine(Fails())
    with pytest.raises(PolicyError, match="step 2: Fails.schedule raised ZeroDivisionError"):
        replay(engine, [Arrival(0.0, "r", [1], greedy(9))])
    assert len(engine.records.steps) == 2


def test_the_real_clock_goes_forward_and_sleeps_until_the_time_is_reached():
    clock = MonotonicClock()
    before = clock.now()
    clock.sleep_until(before + 0.01)
    after = clock.now()
    assert before >= 0 and after >= before + 0.01
    clock.sleep_until(before)
    assert clock.now() >= after
