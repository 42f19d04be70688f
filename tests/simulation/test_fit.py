"""Fits: planted parameters come back, and the error on steps held out is what it says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from research_engine.engine.records import StepRecord
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.basis import Basis
from research_engine.simulation.cost_model import Work, work_of_record
from research_engine.simulation.curve import Curve
from research_engine.simulation.fit import Sample, device_error, fit_profile, fit_samples, refine, run_error
from research_engine.simulation.profiled import ProfiledCost
from research_engine.simulation.step_kind import Ladders

BASE, PER_ROW, PER_KV, PER_PAIR = 3e-3, 5e-6, 4e-9, 6e-10


def planted(work: Work) -> float:
    """Seconds: linear layers flat up to 256 tokens, then linear; nothing else than the coefficients above."""
    pairs = sum(tokens * (before + (tokens + 1) / 2) for tokens, before in work.prefills)
    dense = 1.5e-5 * max(0, work.tokens - 256)
    return BASE + PER_ROW * work.sequences + PER_KV * work.decode_kv + PER_PAIR * pairs + dense


def record_of(rows: list[tuple[int, int]], seconds: float = 0.0, step: int = 0) -> StepRecord:
    starts, tokens = [before for _, before in rows], [count for count, _ in rows]
    names = [str(i) for i in range(len(rows))]
    begin = 100.0 * step
    return StepRecord(step, begin, begin, begin + seconds, begin + seconds, names, starts, tokens, [True] * len(rows),
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
    errors = run_error(profile, [Sample.of(step).timed for step in slower], overlap=False)
    assert errors["bias"] == pytest.approx(1 / 1.25 - 1, abs=0.01)


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="12 steps with rows: a fit needs at least 40"):
        fit_profile(steps(12), model="m", machine={})


def test_steps_of_a_simulation_without_time_are_refused():
    made = steps(50)
    made[7].finished = made[7].started
    with pytest.raises(ValueError, match=r"step 7 took 0\.0 s"):
        fit_profile(made, model="m", machine={})


def test_steps_that_overlap_are_refused():
    made = steps(50)
    made[7].started = made[7].committed = made[6].executed - 1e-4
    with pytest.raises(ValueError, match="step 7 began before step 6 was done"):
        fit_profile(made, model="m", machine={})


def test_a_measured_profile_is_refined_by_the_parts_of_real_steps():
    measured = fit_profile(steps(400), model="m", machine={})
    slower = []
    for step in steps(400, seed=1):
        sample = Sample.of(step)
        parts = ProfiledCost(measured).parts(sample.work)
        device = sum(parts.values()) + 0.5 * parts["dense"]
        slower.append(Sample(sample.work, device, schedule=2e-3 + 1e-6 * sample.work.sequences, after=1e-3))
    refined = refine(measured, slower[:300])
    assert run_error(refined, [sample.timed for sample in slower[300:]], overlap=False)["mape"] < 0.02
    assert refined.dense(2000) == pytest.approx(1.5 * measured.dense(2000), rel=0.03)
    assert refined.attention.per_token == pytest.approx(measured.attention.per_token, rel=0.05)
    assert refined.host.schedule == pytest.approx((2e-3, 1e-6), rel=0.05)
    assert refined.host.after == pytest.approx((1e-3, 0.0), rel=0.05, abs=1e-9)


def test_what_real_steps_do_not_show_stays_as_it_was_measured():
    measured = fit_profile(steps(400), model="m", machine={})
    decodes = [Sample(Work(n, n, n, n, 100 * n, 100), 0.0) for n in range(1, 101)]
    slower = [s._replace(device=1.3 * ProfiledCost(measured).price(s.work)) for s in decodes]
    refined = refine(measured, slower)
    assert device_error(refined, slower)["mape"] < 0.02
    assert refined.attention.prefill[(1, 0)] == pytest.approx(measured.attention.prefill[(1, 0)], rel=0.01)


def test_a_rate_table_comes_back_between_its_points_and_beyond_them():
    true = AttentionFormula(0.0, 0.0, 0.0, 0.0, {(16, 0): 4e-9, (16, 1000): 2e-9, (256, 0): 1e-9, (256, 1000): 3e-9})
    rng = random.Random(0)
    works = [Work(c, 1, 0, prefills=((c, rng.randrange(0, 1500)),)) for c in range(2, 400, 3)]
    basis = Basis((1.0, 400.0), chunks=(16.0, 256.0), befores=(0.0, 1000.0))
    samples = [Sample(work, 1e-7 + 1e-9 * (work.tokens - 1) + true.seconds(work)) for work in works]
    profile = fit_samples(samples, basis, model="m", machine={})
    for point, rate in true.prefill.items():
        assert profile.attention.prefill[point] == pytest.approx(rate, rel=0.1)


def test_few_tokens_after_many_take_the_time_of_their_context_and_it_comes_back():
    true = AttentionFormula(0.0, 0.0, 0.0, 0.0, {(16, 0): 3e-10}, 4e-7)
    rng = random.Random(0)
    works = [Work(c, 2, 0, prefills=((c, rng.randrange(8000)), (2, 5))) for c in range(2, 200, 2)]
    samples = [Sample(work, 5e-3 + true.seconds(work)) for work in works]
    basis = Basis((1.0, 200.0), chunks=(16.0,), befores=(0.0,))
    profile = fit_samples(samples, basis, model="m", machine={})
    assert profile.attention.per_longest_prefill == pytest.approx(4e-7, rel=0.02)
    assert profile.attention.prefill[(16, 0)] == pytest.approx(3e-10, rel=0.1)


def test_a_size_of_a_graph_that_was_not_served_follows_its_neighbours():
    ladders = Ladders((8, 16, 32))
    designed = replace(
        fit_profile(steps(400), model="m", machine={}), ladders=ladders,
        decode_graph=Curve([(8, 3e-3), (16, 4e-3), (32, 5e-3)]),
    )  # fmt: skip
    works = {rows: Work(rows, rows, rows, rows, 100 * rows, 100) for rows in (8, 16, 32)}
    longer = {8: 1.1, 32: 1.4}
    served = [
        Sample(works[rows], factor * ProfiledCost(designed).time_of(works[rows]).device)
        for rows, factor in longer.items() for _ in range(20)
    ]  # fmt: skip
    refined = ProfiledCost(refine(designed, served))
    for rows, factor in {**longer, 16: 1.1 + 0.3 / 3}.items():
        ratio = refined.time_of(works[rows]).device / ProfiledCost(designed).time_of(works[rows]).device
        assert ratio == pytest.approx(factor, rel=0.01)


def test_a_step_that_something_disturbed_does_not_bend_the_fit():
    made = steps(400)
    for step in made[::10]:
        step.executed += 0.5
        step.finished += 0.5
    profile = fit_profile(made, model="m", machine={})
    assert profile.attention.per_token == pytest.approx(PER_KV, rel=0.05)
