"""mlfq: levels by service had, a prompt joins at the level that holds it, and nobody starves."""

from __future__ import annotations

import pytest

from schedulers.mlfq import MLFQ
from tests.engine.shadow import ManualClock, drain, expected, greedy, make_engine


def test_a_new_short_request_takes_the_seat_of_one_that_used_its_quantum_up():
    engine = make_engine(MLFQ(quantum=8), max_num_seqs=1)
    (old,) = engine.add_request("old", range(4), greedy(12))
    for _ in range(4):
        engine.step()  # 4 + 3 tokens computed: one of its quantum is left
    engine.add_request("early", range(50, 54), greedy(1))
    engine.step()
    assert old.is_running and engine.records.steps[-1].request_ids == ["old"]
    engine.step()
    assert [p.request_id for p in engine.records.steps[-1].preemptions] == ["old"]
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["early", "old"]
    assert old.output_token_ids == expected(old)[0]


@pytest.mark.parametrize(("length", "level"), [(1, 0), (8, 0), (9, 1), (16, 1), (17, 2), (40, 2)])
def test_a_prompt_joins_at_the_first_level_whose_quantum_holds_it(length, level):
    """Skip-join: it would only use up the quanta above. The last level takes all that is longer."""
    policy = MLFQ(levels=3, quantum=8, growth=2.0)
    engine = make_engine(policy)
    (request,) = engine.add_request("r", range(length), greedy(1))
    assert policy.rank(request)[0] == level


def test_requests_of_the_last_level_take_turns():
    engine = make_engine(MLFQ(levels=1, quantum=2), max_num_batched_tokens=1)
    for name in "ab":
        engine.add_request(name, [1], greedy(4))
    drain(engine)
    assert "".join(step.request_ids[0] for step in engine.records.steps) == "aabbaabb"


def test_recompute_uses_no_quantum_up():
    """Preempted and computed again, a request stays where it was."""
    policy = MLFQ(quantum=16, levels=2)
    engine = make_engine(policy, max_num_seqs=1, enable_prefix_caching=False)
    (request,) = engine.add_request("r", range(8), greedy(9))
    engine.step()
    engine.step()
    job = policy._jobs["r"]
    left = job.left
    policy.order = lambda view: [r for r in view.waiting if r.id == "x"] or view.running  # type: ignore[method-assign]
    policy.yielding = lambda candidates, needy, view: candidates  # type: ignore[method-assign]
    engine.add_request("x", [1], greedy(1))
    engine.step()
    assert request.num_preemptions == 1
    del policy.order, policy.yielding
    engine.step()
    assert request.num_recomputed_tokens == 9 and job.left == left - 1
    drain(engine)


def wait_of_the_long_prompt(starvation: float, horizon: int = 120) -> float | None:
    """A short request comes in every second and takes one; when is the long prompt, three levels below, served?"""
    clock = ManualClock()
    policy = MLFQ(quantum=4, starvation=starvation)
    engine = make_engine(policy, max_num_seqs=1, clock=clock)
    (long,) = engine.add_request("long", range(30), greedy(1), arrival_time=0.0)
    for second in range(horizon):
        clock.time = float(second)
        engine.add_request(str(second), [1], greedy(1), arrival_time=clock.time)
        engine.step()
        if long.first_scheduled_time is not None:
            return long.first_scheduled_time
    return None


@pytest.mark.parametrize("starvation", [5.0, 20.0])
def test_a_request_is_served_soon_after_the_starvation_limit(starvation):
    """S8: it then stands behind those at the top alone, here one."""
    wait = wait_of_the_long_prompt(starvation)
    assert wait is not None and starvation < wait <= starvation + 3


def test_without_the_guard_the_long_prompt_starves():
    assert wait_of_the_long_prompt(float("inf")) is None


@pytest.mark.parametrize(("field", "value"), [("levels", 0), ("quantum", 0), ("growth", 0.5), ("starvation", 0)])
def test_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = {value}: must be"):
        MLFQ(**{field: value})
