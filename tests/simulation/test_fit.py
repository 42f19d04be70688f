"""Fits: planted parameters come back, and the error on steps held out is what it says."""

from __future__ import annotations

import random

import pytest

from research_engine.engine.records import StepRecord
from research_engine.simulation.cost_model import Work, work_of_record
from research_engine.simulation.fit import fit_profile, step_error
from research_engine.simulation.profiled import ProfiledCost

BASE, PER_ROW, PER_KV, PER_PAIR = 3e-3, 5e-6, 4e-9, 6e-10


def planted(work: Work) -> float:
    """Seconds: linear layers flat up to 256 tokens, then linear; nothing else than the coefficients above."""
    pairs = sum(tokens * (before + (tokens + 1) / 2) for tokens, before in work.prefills)
    dense = 1.5e-5 * max(0, work.tokens - 256)
    return BASE + PER_ROW * work.sequences + PER_KV * work.decode_kv + PER_PAIR * pairs + dense


def record_of(rows: list[tuple[int, int]], seconds: float = 0.0, step: int = 0) -> StepRecord:
    starts, tokens = [before for _, before in rows], [count for count, _ in rows]
    names = [str(i) for i in range(len(rows))]
    return StepRecord(step, 1.0, 1.0, 1.0 + seconds, 1.0 + seconds, names, starts, tokens, [True] * len(rows),
                      len(rows), 0, 1, 0, 1, 1, [], 0, 0, 0)  # fmt: skip


def steps(count: int, noise: float = 0.0, seed: int = 0) -> list[StepRecord]:
    rng, made = random.Random(seed), []
    for step in range(count):
        rows = [(1, rng.randrange(10, 4000)) for _ in range(rng.randrange(1, 200))]
        if rng.random() < 0.5:
            rows.append((rng.randrange(2, 2048), rng.choice([0, 0, 1024, 5000])))
        seconds = planted(work_of_record(record_of(rows))) * (1 + noise * rng.uniform(-1, 1))
        made.append(record_of(rows, seconds, step))
    return made


def test_planted_parameters_come_back():
    profile = fit_profile(steps(400), model="m", machine={})
    assert profile.attention.per_token == pytest.approx(PER_KV, rel=0.02)
    assert profile.attention.prefill[(1, 0)] == pytest.approx(PER_PAIR, rel=0.05)
    assert profile.held_out["mape"] < 0.01


def test_a_fitted_profile_prices_batches_larger_than_any_it_saw():
    cost = ProfiledCost(fit_profile(steps(400), model="m", machine={}))
    work = Work(8000, 401, 401, 400, 400 * 3000, 9000, ((7600, 0),))
    assert cost.price(work) == pytest.approx(planted(work), rel=0.05)


def test_a_fifth_of_the_steps_is_held_out_and_its_error_is_that_of_the_noise():
    profile = fit_profile(steps(500, noise=0.1), model="m", machine={})
    assert profile.held_out["steps"] == 100
    assert 0.03 < profile.held_out["mape"] < 0.07  # uniform noise of 10 % has a mean of 5 %
    assert abs(profile.held_out["bias"]) < 0.02


def test_steps_held_out_do_not_shape_the_fit():
    clean, spoilt = steps(400), steps(400)
    for index in range(4, 400, 5):
        spoilt[index].finished += 1.0
    fits = [fit_profile(made, model="m", machine={}) for made in (clean, spoilt)]
    assert fits[0].dense.points == fits[1].dense.points
    assert fits[0].attention == fits[1].attention
    assert fits[1].held_out["bias"] < -0.9


def test_the_error_of_a_profile_can_be_taken_on_another_run():
    profile = fit_profile(steps(400), model="m", machine={})
    slower = steps(100, seed=1)
    for step in slower:
        step.finished = step.started + 1.25 * (step.finished - step.started)
    assert step_error(profile, slower)["bias"] == pytest.approx(1 / 1.25 - 1, abs=0.01)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="12 steps with rows: a fit needs at least 40"):
        fit_profile(steps(12), model="m", machine={})


def test_steps_of_a_simulation_without_time_are_refused():
    made = steps(50)
    made[7].finished = made[7].started
    with pytest.raises(ValueError, match="step 7 took 0.0 s"):
        fit_profile(made, model="m", machine={})
