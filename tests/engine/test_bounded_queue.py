"""A bounded queue refuses what comes too much, with the numbers, and takes it again once there is room."""

from __future__ import annotations

import pytest

from research_engine.engine.driver import Arrival, replay
from research_engine.engine.errors import QueueFullError, RequestError
from schedulers.fcfs import FCFS

from .shadow import assert_empty, drain, greedy, make_engine


def test_a_full_queue_refuses_by_limit_and_length_and_nothing_is_kept():
    engine = make_engine(FCFS(), max_num_queued=2, max_num_seqs=1)
    for name in "ab":
        engine.add_request(name, [1, 2], greedy())
    message = r"request 'c': the queue is full: 2 requests wait, max_num_queued = 2"
    with pytest.raises(QueueFullError, match=message):
        engine.add_request("c", [1, 2], greedy())
    assert engine.num_unfinished == 2
    engine.step()  # a is admitted
    engine.add_request("c", [1, 2], greedy())
    drain(engine)
    assert sorted(record.request_id for record in engine.records.requests) == ["a", "b", "c"]
    assert_empty(engine)


def test_running_requests_do_not_count():
    engine = make_engine(FCFS(), max_num_queued=1)
    for name in "abcd":
        engine.add_request(name, [1, 2], greedy(20))
        engine.step()
    assert engine.view().num_running == 4


def test_a_request_that_can_never_be_served_is_told_so_even_when_the_queue_is_full():
    engine = make_engine(FCFS(), max_num_queued=1)
    engine.add_request("a", [1], greedy())
    with pytest.raises(RequestError, match="the prompt is empty") as refusal:
        engine.add_request("b", [], greedy())
    assert not isinstance(refusal.value, QueueFullError)


def test_a_replay_records_what_the_queue_refused_and_goes_on():
    engine = make_engine(FCFS(), max_num_queued=3)
    report = replay(engine, [Arrival(0.0, f"r{index}", [index], greedy(2)) for index in range(5)])
    assert sorted(report.refused) == ["r3", "r4"] and sorted(report.entered) == ["r0", "r1", "r2"]
    assert [r.finish_reason for r in engine.records.requests] == ["refused", "refused", "length", "length", "length"]


def test_without_a_bound_every_request_waits():
    engine = make_engine(FCFS(), max_num_seqs=1)
    for index in range(100):
        engine.add_request(str(index), [index], greedy(1))
    drain(engine)
    assert len(engine.records.requests) == 100
