"""KeptQueue: after any events it holds those that wait, in order."""

from __future__ import annotations

import random

import pytest

import schedulers
from schedulers.kept_queue import KeptQueue
from tests.engine.random_runs import RandomRun
from tests.engine.shadow import drain, greedy, make_engine


@pytest.mark.parametrize("name", ["edf", "mlfq", "sjf", "srpt", "vtc"])
def test_it_holds_those_that_wait_in_order_after_every_step(name):
    """Random runs with aborts at any moment, ids used again, continuations, preemption by swap and recompute."""
    for seed in range(25):
        run = RandomRun(seed, lambda rng: schedulers.create(name, preemption="swap", admission="chunk", watermark=0.0))
        for _ in range(150):
            run.step()
            shelves = run.engine.scheduler.queue.shelves
            held = [request.id for shelf in shelves.values() for _, request in shelf]
            assert sorted(held) == sorted(request.id for request in run.engine.view().waiting)
            assert all(shelf == sorted(shelf) and shelf for shelf in shelves.values())


def test_an_id_that_lives_again_in_the_step_in_flight_waits():
    """S13: the step's record names the old request; the new one must not be taken for admitted."""
    engine = make_engine(schedulers.create("edf"))
    engine.add_request("x", [1, 2], greedy(3))
    view = engine.view()
    batch = engine.commit(engine.plan(view), view)
    result = engine.execute(batch)
    engine.abort("x")
    engine.add_request("x", [3, 4], greedy(3))
    engine.update(batch, result)
    drain(engine)
    assert [r.finish_reason for r in engine.records.requests] == ["abort", "length"]


def test_a_request_whose_rank_changed_is_put_where_it_belongs():
    ranks = {}
    queue = KeptQueue(lambda request: (ranks[request.id], request.index))
    engine = make_engine(schedulers.create("fcfs"))
    requests = [engine.add_request(name, [1], greedy(1))[0] for name in "abc"]
    for request, rank in zip(requests, random.Random(0).sample(range(9), 3), strict=True):
        ranks[request.id] = rank
        queue.arrive(request)
    ranks["b"] = 100
    queue.reorder(requests[1])
    assert queue.waiting()[-1] == ((100, 1), requests[1])
    for request in requests:
        queue.finish(request)
    assert not queue.waiting() and not queue.shelves
