"""One trace on a real executor and in virtual time with its step times replayed: the same decisions, step by step."""

from __future__ import annotations

import random
from typing import Any

import pytest

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, ReplayReport, replay
from research_engine.engine.engine import Engine
from research_engine.engine.records import StepRecord
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.replay import ReplayCost, ReplayMismatch

POLICIES = [("fcfs", {}), ("chunked_prefill", {"token_budget": 48}), ("priority", {}),
            ("chunked_prefill", {"preemption": "swap"})]  # fmt: skip
# few blocks, so that requests wait and are preempted
CONFIG = EngineConfig(
    num_blocks=30, block_size=8, num_host_blocks=40, max_num_seqs=6, max_num_batched_tokens=96, max_model_len=200,
    vocab_size=259,
)  # fmt: skip


def workload(rate: float, seed: int, count: int = 30, at_once: int = 0) -> list[Arrival]:
    """`count` random requests, Poisson at `rate` per second after the first `at_once`, which arrive together."""
    rng, now, made = random.Random(seed), 0.0, []
    shared = [rng.randrange(256) for _ in range(40)]  # a prefix that some have in common, for the prefix cache
    for index in range(count):
        now += rng.expovariate(rate) if index >= at_once else 0.0
        prompt = (shared if rng.random() < 0.4 else []) + [rng.randrange(256) for _ in range(rng.randrange(2, 90))]
        sampling = SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40), ignore_eos=True)
        made.append(Arrival(now, f"r{index}", prompt, sampling, priority=rng.randrange(3)))
    return made


def decisions(steps: list[StepRecord]) -> list[tuple[object, ...]]:
    """All that a step decided, and the state it left; no times."""
    return [
        (s.request_ids, s.starts, s.num_tokens, s.drew, s.num_running, s.num_waiting, s.blocks_used, s.blocks_cached,
         s.blocks_free, s.slots_stored, s.preemptions, s.blocks_copied, s.blocks_swapped_in, s.blocks_swapped_out)
        for s in steps
    ]  # fmt: skip


def replayed(
    real: Engine, report: ReplayReport, arrivals: list[Arrival], policy: str, parameters: dict[str, Any]
) -> Engine:
    cost, clock = ReplayCost.of(real.records.steps, report)
    engine = simulated_engine(real.config, schedulers.create(policy, **parameters), cost, clock=clock)
    replay(engine, arrivals)
    return engine


@pytest.mark.parametrize(("policy", "parameters"), POLICIES)
def test_a_real_run_and_its_replay_in_virtual_time_decide_alike(policy, parameters):
    torch_executor = pytest.importorskip("research_engine.executors.torch_executor")
    from research_engine.llm import load
    from research_engine.options import EngineOptions

    loaded = load(EngineOptions("dummy:tiny", device="cpu", skip_tokenizer_init=True), progress=False)
    executor = torch_executor.TorchExecutor(loaded.model, CONFIG)
    # more than the cache holds come together, so that the machine's speed has no say in whether one is preempted
    arrivals = workload(rate=60.0, seed=len(policy) + len(parameters), at_once=12)
    real = Engine(CONFIG, schedulers.create(policy, **parameters), executor)
    report = replay(real, arrivals)
    simulated = replayed(real, report, arrivals, policy, parameters)
    assert decisions(simulated.records.steps) == decisions(real.records.steps)
    assert any(step.preemptions for step in real.records.steps) or policy == "fcfs"


@pytest.mark.parametrize("rate", [5.0, 60.0, 1000.0])
def test_arrivals_enter_between_the_same_steps(rate):
    """With pauses, without, and with everything at once; a clock that moves at every reading leaves gaps everywhere."""
    from tests.engine.shadow import ManualClock, ShadowExecutor

    clock = ManualClock(tick=0.0007)
    arrivals = workload(rate, seed=7)
    real = Engine(CONFIG, schedulers.create("priority"), ShadowExecutor(CONFIG), clock=clock)
    real.executor.before = lambda batch: clock.sleep_until(clock.time + 0.004 + 0.0001 * batch.num_tokens)
    report = replay(real, arrivals)
    simulated = replayed(real, report, arrivals, "priority", {})
    assert decisions(simulated.records.steps) == decisions(real.records.steps)
    ends = [step.finished for step in real.records.steps]
    assert [step.finished for step in simulated.records.steps] == pytest.approx(ends, abs=0.01)


@pytest.mark.parametrize("late", range(0, 60, 3))
def test_a_request_that_comes_just_after_an_idle_steps_end_enters_with_one_that_was_due_by_then(late):
    """`late` ms after the second at which the first step ends, in a gap of 10 ms at every reading of the clock."""
    from tests.engine.shadow import ManualClock, ShadowExecutor

    clock, once = ManualClock(tick=0.01), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    arrivals = [Arrival(0.0, "r0", [1, 2], once), Arrival(0.5, "r1", [3, 4], once),
                Arrival(1.0 + late / 1000, "r2", [5, 6], once)]  # fmt: skip
    real = Engine(CONFIG, schedulers.create("fcfs"), ShadowExecutor(CONFIG), clock=clock)
    real.executor.before = lambda batch: clock.sleep_until(clock.time + 1.0)
    report = replay(real, arrivals)
    simulated = replayed(real, report, arrivals, "fcfs", {})
    assert decisions(simulated.records.steps) == decisions(real.records.steps)


@pytest.mark.parametrize(("policy", "parameters"), POLICIES)
def test_a_clock_that_stalls_anywhere_changes_no_decision(policy, parameters):
    """One look at the clock in five is followed by 30 ms in which nothing is done, as on a busy machine."""
    from tests.engine.shadow import ManualClock, ShadowExecutor

    class Stalling(ManualClock):
        def now(self) -> float:
            self.time += rng.choice([1e-6, 1e-5, 1e-5, 1e-4, 0.03])
            return self.time

    for seed in range(8, 15):
        rng, clock = random.Random(seed), Stalling()
        arrivals = workload(rate=60.0, seed=seed, at_once=6 * (seed % 3))
        real = Engine(CONFIG, schedulers.create(policy, **parameters), ShadowExecutor(CONFIG), clock=clock)
        real.executor.before = lambda batch, clock=clock: clock.sleep_until(
            clock.time + 0.001 + 1e-4 * batch.num_tokens
        )
        report = replay(real, arrivals)
        simulated = replayed(real, report, arrivals, policy, parameters)
        assert decisions(simulated.records.steps) == decisions(real.records.steps), seed


def test_another_policy_cannot_be_given_the_recorded_times():
    from tests.engine.shadow import ManualClock, ShadowExecutor

    arrivals = workload(rate=1000.0, seed=3)
    real = Engine(CONFIG, schedulers.create("fcfs"), ShadowExecutor(CONFIG), clock=ManualClock(tick=0.001))
    report = replay(real, arrivals)
    with pytest.raises(ReplayMismatch, match="the recorded one was"):
        replayed(real, report, arrivals, "chunked_prefill", {"token_budget": 16})
