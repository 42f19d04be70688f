"""A device under a power limit: slow after work, quick after rest, and a long step is as many short ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.cost_model import StepTime
from research_engine.simulation.curve import Curve
from research_engine.simulation.power import PowerLevel, PowerLimit, PowerState
from research_engine.simulation.profiled import Profile, ProfiledCost
from research_engine.simulation.step_kind import StepKind

LIMIT = PowerLimit(0.04, 1000.0, {StepKind.LAUNCHED: 0.1})
STEP = StepTime(0.0, 0.0, 0.01, 0.0, rate=3000.0, slope=0.1)


def test_a_rested_device_takes_the_time_of_a_rested_one():
    assert PowerState(LIMIT).seconds(STEP, 5.0) == STEP.device


def test_a_device_kept_busy_takes_longer_step_by_step_up_to_what_its_rate_says():
    state, now, taken = PowerState(LIMIT), 0.0, []
    for _ in range(60):
        taken.append(state.seconds(STEP, now))
        now += taken[-1]
    assert taken == sorted(taken)
    assert taken[-1] == pytest.approx(0.01 * (1 + 0.1 * (3000 / 1000 - 1) ** 2), rel=1e-3)
    assert taken[1] < taken[-1]


def test_a_pause_lets_it_rest():
    state = PowerState(LIMIT)
    for at in range(40):
        state.seconds(STEP, 0.012 * at)
    tired = state.seconds(STEP, 0.48)
    assert state.seconds(STEP, 0.6) < tired
    assert state.seconds(STEP, 3.0) == STEP.device


def test_a_step_that_the_limit_does_not_touch_still_tires_the_device():
    state = PowerState(LIMIT)
    untouched = STEP._replace(slope=0.0)
    for at in range(40):
        assert state.seconds(untouched, 0.01 * at) == STEP.device
    assert state.seconds(STEP, 0.4) > STEP.device


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1e5), st.integers(1, 8))
def test_a_long_step_leaves_the_level_of_as_many_short_ones(seconds, rate, parts):
    whole, split = PowerLevel(0.04), PowerLevel(0.04)
    for level in (whole, split):
        level.during(0.0, 0.02, 5e3)
        level.pass_by(0.02, 5e3)
    mean = whole.during(0.03, seconds, rate)
    whole.pass_by(seconds, rate)
    means = []
    for part in range(parts):
        means.append(split.during(0.03 + seconds * part / parts, seconds / parts, rate))
        split.pass_by(seconds / parts, rate)
    assert split.level == pytest.approx(whole.level, rel=1e-6, abs=1e-6)
    assert sum(means) / parts == pytest.approx(mean, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [({"window": 0.0}, "window = 0.0"), ({"threshold": float("inf")}, "threshold = inf"),
     ({"slopes": {StepKind.LAUNCHED: -1.0}}, "slopes.'launched'. = -1.0")],
)  # fmt: skip
def test_a_limit_that_is_none_is_refused_with_the_number(wrong, rule):
    with pytest.raises(ValueError, match=rule):
        replace(LIMIT, **wrong)


PROFILE = Profile(
    "m", {}, Curve([(1, 4e-3), (512, 9e-3)]), Curve([(0, 0.0)]), AttentionFormula(0.0, 0.0, 1e-7, 0.0, {(1, 0): 1e-9})
)


def test_a_profile_keeps_its_limit(tmp_path):
    replace(PROFILE, power=LIMIT).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").power == LIMIT


@pytest.mark.parametrize(
    ("power", "told"),
    [
        ({"window": True}, "power.window = True: must be seconds, a number from 0.0001 to 3600"),
        ({"window": "0.04"}, "power.window = '0.04': must be seconds, a number"),
        ({"window": 1e-300}, "power.window = 1e-300: must be seconds"),
        ({"window": 1e300}, "power.window = 1e+300: must be seconds"),
        ({"threshold": 1e-305}, "power.threshold = 1e-305: must be tokens a second, a number from 0.001 to 1e+12"),
        ({"threshold": None}, "power.threshold = None: must be tokens a second"),
        ({"threshold": float("nan")}, "power.threshold = nan: must be tokens a second"),
        ({"threshold": 10**400}, "power.threshold = 1000"),
        (
            {"slopes": {"launched": 1e308}},
            "power.slopes['launched'] = 1e+308: must be a share, a number from 0 to 1000",
        ),
        ({"slopes": {"launched": False}}, "power.slopes['launched'] = False: must be a share"),
        ({"slopes": {"lunched": 0.1}}, "power.slopes: no kind of steps 'lunched'; valid ones, nearest first: launched"),
        ({"slopes": [0.1]}, "power.slopes = [0.1]: must map kinds of steps to shares"),
    ],
    ids=str,
)
def test_a_damaged_limit_is_refused_with_file_key_value_and_rule(power, told, tmp_path):
    path = tmp_path / "p.json"
    replace(PROFILE, power=LIMIT).save(path)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "power": {**data["power"], **power}}))
    with pytest.raises(ValueError) as caught:
        Profile.load(path)
    assert str(caught.value).startswith(f"{path}: the profile is corrupt: {told}")


@pytest.mark.parametrize("key", ["window", "threshold", "slopes", None])
def test_a_limit_with_a_part_missing_is_refused(key, tmp_path):
    path = tmp_path / "p.json"
    replace(PROFILE, power=LIMIT).save(path)
    data = json.loads(path.read_text())
    power = {name: value for name, value in data["power"].items() if name != key} if key else 0.04
    path.write_text(json.dumps({**data, "power": power}))
    told = f"power.{key}: is not there" if key else "power = 0.04: must hold window, threshold and slopes"
    with pytest.raises(ValueError, match=told):
        Profile.load(path)


def test_a_limit_at_its_bounds_gives_times_that_are_finite():
    for window in (1e-4, 3600.0):
        state = PowerState(PowerLimit(window, 1e-3, {StepKind.LAUNCHED: 1000.0}))
        for at in range(3):
            assert 0.0 < state.seconds(STEP._replace(device=1e-9, rate=1e15, slope=1000.0), float(at)) < 1e31


def served(profile: Profile, rate: float) -> float:
    """Mean seconds from the first to the last token, of requests that come so many a second."""
    config = EngineConfig(num_blocks=4000, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1000)
    engine = simulated_engine(config, schedulers.create("chunked_prefill"), ProfiledCost(profile))
    sampling = SamplingParams(max_tokens=20)
    replay(engine, [Arrival(i / rate, str(i), range(900 * i, 900 * i + 400), sampling) for i in range(80)])
    records = engine.records.requests
    return sum(r.last_token_time - r.first_token_time for r in records) / len(records)


def test_a_simulated_engine_is_slower_under_load_and_not_beside_it():
    limited = replace(PROFILE, power=PowerLimit(0.04, 15000.0, {StepKind.LAUNCHED: 0.1}))
    assert served(limited, 1.0) == served(PROFILE, 1.0)
    assert served(limited, 80.0) > 1.02 * served(PROFILE, 80.0)
