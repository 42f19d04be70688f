"""chunked_prefill: every running answer gets its token in every step, whatever prompts arrive."""

from __future__ import annotations

import random

import pytest

from schedulers.chunked_prefill import ChunkedPrefill
from tests.engine.shadow import assert_empty, drain, expected, greedy, make_engine


@pytest.mark.parametrize("budget", [0, 8, 12])
def test_decodes_get_a_token_in_every_step_while_long_prompts_arrive(rows, budget):
    """S9: prompts longer than a step come without end; no running answer ever waits."""
    engine = make_engine(ChunkedPrefill(token_budget=budget), num_blocks=200, max_num_batched_tokens=16)
    answers = [engine.add_request(f"answer {i}", range(40 * i, 40 * i + 4), greedy(40))[0] for i in range(3)]
    while not all(r.is_decoding for r in answers):
        engine.step()
    first = len(engine.records.steps)
    for i in range(30):
        engine.add_request(f"prompt {i}", range(1000 * i, 1000 * i + 50), greedy(2))
        engine.step()
    for step in rows(engine)[first:]:
        assert all(step[r.id] == 1 for r in answers)
    assert any(step.get("prompt 0", 0) > 1 for step in rows(engine)[first:]), "prompts get on as well"


@pytest.mark.parametrize(("budget", "limit"), [(0, 16), (6, 6), (100, 16)])
def test_the_token_budget_of_a_step_is_kept_and_used(rows, budget, limit):
    """A chunk fills what the decodes leave; the budget is never above the engine's own limit."""
    engine = make_engine(ChunkedPrefill(token_budget=budget), num_blocks=64, max_num_batched_tokens=16)
    for i in range(4):
        engine.add_request(str(i), range(100 * i, 100 * i + 25), greedy(4))
    drain(engine)
    totals = [sum(step.values()) for step in rows(engine)]
    assert max(totals) == limit
    work = 25 * 4
    assert all(total == limit for total in totals[: work // limit - 2]), "prompts wait, and a step is half empty"


def test_prompts_wait_while_answers_fill_the_token_budget(rows):
    """The budget holds prompts back, never answers: the next prompt begins when an answer ends."""
    engine = make_engine(ChunkedPrefill(token_budget=2), num_blocks=64)
    for i in range(3):
        engine.add_request(str(i), [i], greedy(4))
    drain(engine)
    assert rows(engine) == [{"0": 1, "1": 1}] * 4 + [{"2": 1}] * 4
    assert_empty(engine)


def test_prompts_under_way_go_before_new_ones(rows):
    engine = make_engine(ChunkedPrefill(), max_num_batched_tokens=8, num_blocks=32)
    engine.add_request("first", range(20), greedy(1))
    engine.add_request("second", range(50, 70), greedy(1))
    drain(engine)
    assert rows(engine) == [{"first": 8}, {"first": 8}, {"first": 4, "second": 4}, {"second": 8}, {"second": 8}]


def test_the_outputs_are_those_of_any_budget():
    """Chunk size changes the times of tokens, never the tokens."""
    for seed in range(20):
        rng = random.Random(seed)
        engine = make_engine(ChunkedPrefill(token_budget=rng.randint(1, 20)), num_blocks=14, max_num_batched_tokens=24)
        requests = [
            engine.add_request(str(i), [rng.randrange(40) for _ in range(rng.randint(1, 30))], greedy(8))[0]
            for i in range(5)
        ]
        drain(engine)
        assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]


@pytest.mark.parametrize("value", [-1, 1.5, "8"])
def test_a_budget_that_is_no_number_of_tokens_is_refused(value):
    with pytest.raises(ValueError, match=r"token_budget = .*must be an integer >= 0"):
        ChunkedPrefill(token_budget=value)
