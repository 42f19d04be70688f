"""static_batch: nobody joins a batch that runs."""

from __future__ import annotations

import random

import pytest

from schedulers.static_batch import StaticBatch
from tests.engine.shadow import drain, greedy, make_engine


@pytest.mark.parametrize("batch_size", [0, 2])
def test_nobody_is_admitted_before_the_last_of_the_batch_has_ended(rows, batch_size):
    """Random lengths and arrivals: a step with a newcomer holds newcomers alone, batch_size or the seats at most."""
    for seed in range(20):
        rng = random.Random(seed)
        engine = make_engine(StaticBatch(batch_size=batch_size), num_blocks=64, max_num_seqs=3)
        for i in range(9):
            engine.add_request(str(i), range(50 * i, 50 * i + rng.randint(1, 20)), greedy(rng.randint(1, 10)))
            if rng.random() < 0.5:
                engine.step()
        drain(engine)
        seen: set[str] = set()
        for step in rows(engine):
            newcomers = step.keys() - seen
            assert not newcomers or newcomers == step.keys(), "somebody joined a batch under way"
            assert len(step) <= (batch_size or 3)
            seen |= newcomers


def test_the_batch_fills_the_seats_that_the_step_has_room_for(rows):
    engine = make_engine(StaticBatch(), max_num_seqs=3, max_num_batched_tokens=12)
    for name in "abcd":
        engine.add_request(name, range(ord(name), ord(name) + 5), greedy(2))
    drain(engine)
    assert rows(engine) == [{"a": 5, "b": 5}, {"a": 1, "b": 1}, {"c": 5, "d": 5}, {"c": 1, "d": 1}]


def test_a_batch_size_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="batch_size = -1: must be an integer >= 0"):
        StaticBatch(batch_size=-1)
