"""Steps foretold one by one: with the true costs there is no error, whether the host or the device ends them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.cost_model import work_of_record
from research_engine.simulation.curve import Curve
from research_engine.simulation.host_cost import HostCost
from research_engine.simulation.power import PowerLimit
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.step_kind import Ladders, StepKind
from research_engine.simulation.timeline import TimedStep, step_error, step_times

LAUNCHES = HostCost((1e-4, 1e-6), {StepKind.DECODE_GRAPH: (3e-4, 0.0, 0.0), StepKind.LAUNCHED: (7e-3, 0.0, 0.0)}, 6e-3,
                    (2e-4, 1e-6))  # fmt: skip
PROFILE = Profile(
    "m", {}, Curve([(1, 4e-3), (512, 9e-3)]), Curve([(0, 0.0), (16, 1e-4)]),
    AttentionFormula(0.0, 0.0, 1e-7, 0.0, {(1, 0): 1e-9}), host=LAUNCHES,
    ladders=Ladders((1, 4, 8, 16)), decode_graph=Curve([(1, 3e-3), (16, 4e-3)]),
)  # fmt: skip


def run_of(profile: Profile, *, overlap: bool) -> list[TimedStep]:
    rng, now, arrivals = random.Random(3), 0.0, []
    for index in range(60):
        now += rng.expovariate(40.0)
        prompt = range(1000 * index, 1000 * index + rng.randrange(2, 400))
        arrivals.append(Arrival(now, str(index), prompt, SamplingParams(max_tokens=rng.randrange(1, 30))))
    config = EngineConfig(num_blocks=2000, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=600,
                          overlap=overlap)  # fmt: skip
    engine = simulated_engine(config, schedulers.create("chunked_prefill"), ProfiledCost(profile))
    replay(engine, arrivals)
    steps = [step for step in engine.records.steps if step.request_ids]
    return [TimedStep(work_of_record(step), step.started, step.executed, step.finished) for step in steps]


def launching(seconds: float) -> Profile:
    """PROFILE, whose launched steps take the host so long."""
    handover = {**LAUNCHES.handover, StepKind.LAUNCHED: (seconds, 0.0, 0.0)}
    return replace(PROFILE, host=replace(LAUNCHES, handover=handover, launch=0.9 * seconds))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seconds", [5e-4, 7e-3, 2e-2])
def test_with_the_true_costs_no_step_is_foretold_wrongly(overlap, seconds):
    profile = launching(seconds)
    steps = run_of(profile, overlap=overlap)
    assert {profile.ladders.kind(step.work) for step in steps} == {StepKind.DECODE_GRAPH, StepKind.LAUNCHED}
    real, foretold = step_times(steps, ProfiledCost(profile), overlap=overlap)
    assert foretold == pytest.approx(real, abs=1e-9)


@pytest.mark.parametrize("overlap", [False, True])
def test_with_the_true_power_limit_no_step_is_foretold_wrongly(overlap):
    limit = PowerLimit(0.03, 1500.0, dict.fromkeys(StepKind, 0.1))
    profile = replace(launching(5e-4), power=limit)
    steps = run_of(profile, overlap=overlap)
    real, foretold = step_times(steps, ProfiledCost(profile), overlap=overlap)
    assert foretold == pytest.approx(real, abs=1e-9)
    rested = step_times(steps, ProfiledCost(replace(profile, power=None)), overlap=overlap)[1]
    assert (rested / real).min() < 0.95


def test_a_host_that_was_away_is_not_taken_for_a_device_that_was_slow():
    profile = launching(5e-4)
    steps = run_of(profile, overlap=True)
    at = next(i for i in range(10, len(steps)) if steps[i].started < steps[i - 1].executed)
    late = [
        step._replace(
            started=step.started + 0.2 * (i > at),
            executed=step.executed + 0.2 * (i >= at),
            finished=step.finished + 0.2 * (i >= at),
        )
        for i, step in enumerate(steps)
    ]
    late[at + 1] = late[at + 1]._replace(started=steps[at + 1].started, executed=late[at].executed + 1e-4)
    _, foretold = step_times(late, ProfiledCost(profile), overlap=True)
    assert foretold[at + 1] < 2e-3


def test_an_error_in_one_step_is_not_carried_into_the_next_where_the_device_was_waited_for():
    profile = launching(5e-4)
    steps = run_of(profile, overlap=True)
    slow = replace(profile, decode_graph=Curve((x, 1.1 * y) for x, y in profile.decode_graph.points))
    real, foretold = step_times(steps, ProfiledCost(slow), overlap=True)
    errors = foretold / real - 1
    decodes = np.array([profile.ladders.kind(step.work) is StepKind.DECODE_GRAPH for step in steps])
    assert 0.09 < np.median(errors[decodes]) < 0.1
    assert errors[decodes].max() < 0.11
    assert np.abs(errors[~decodes]).mean() < 1e-3


def test_without_steps_there_is_no_error_to_tell():
    error = step_error(np.array([]), np.array([]))
    assert error["steps"] == 0
    assert math.isnan(error["mape"])
