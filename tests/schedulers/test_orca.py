"""orca: joins and leaves step by step, reserves for the whole answer, preempts nobody."""

from __future__ import annotations

import random

import pytest

from schedulers.orca import Orca
from tests.engine.shadow import drain, expected, greedy, make_engine


def test_a_seat_is_taken_in_the_step_after_its_request_ended(rows):
    engine = make_engine(Orca(max_batch_size=2))
    for name, outputs in (("short", 2), ("long", 4), ("next", 2)):
        engine.add_request(name, range(ord(name[0]), ord(name[0]) + 4), greedy(outputs))
    drain(engine)
    assert rows(engine) == [
        {"short": 4, "long": 4},
        {"short": 1, "long": 1},
        {"long": 1, "next": 4},
        {"long": 1, "next": 1},
    ]


def test_nobody_is_ever_preempted_and_nobody_admitted_out_of_turn():
    """Random lengths in a pool that fits about two of them."""
    for seed in range(40):
        rng = random.Random(seed)
        engine = make_engine(
            Orca(watermark=0.0), num_blocks=8, max_num_seqs=6, max_num_batched_tokens=rng.randint(4, 40)
        )
        requests = []
        for i in range(8):
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            requests += engine.add_request(str(i), prompt, greedy(rng.randint(1, 16)))
            if rng.random() < 0.5:
                engine.step()
        drain(engine)
        assert not any(step.preemptions for step in engine.records.steps)
        times = [r.first_scheduled_time for r in requests]
        assert times == sorted(times)
        assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]


def test_a_request_waits_for_the_slots_that_others_may_still_need():
    """Both prompts fit together, both answers do not; the paged way would admit both."""
    engine = make_engine(Orca(), num_blocks=6)
    engine.add_request("first", range(4), greedy(13))
    (second,) = engine.add_request("second", range(50, 54), greedy(13))
    engine.step()
    assert engine.view().num_free_blocks >= 4 and not second.is_running
    drain(engine)


def test_a_batch_size_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="max_batch_size = 1.5: must be an integer >= 0"):
        Orca(max_batch_size=1.5)
