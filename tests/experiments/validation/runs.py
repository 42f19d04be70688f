"""Recorded runs whose every time is known: a simulated engine of planted costs plays the real one."""

from __future__ import annotations

import random

import schedulers
from experiments.validation.recording import RecordedRun, Recording, record_run
from research_engine.engine.config import EngineConfig
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.attention_cost import AttentionFormula
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.clock import VirtualClock
from research_engine.simulation.curve import Curve
from research_engine.simulation.host_cost import HostCost
from research_engine.simulation.profiled import Profile, ProfiledCost

CONFIG = EngineConfig(num_blocks=60, block_size=8, max_num_seqs=6, max_num_batched_tokens=96, max_model_len=200,
                      vocab_size=259, eos_token_ids=(258,), enable_prefix_caching=False)  # fmt: skip
RATE = 20.0
PROFILE = Profile(
    "m", {"gpu": "planted"}, Curve([(1, 0.01), (96, 0.04)]), Curve([(0, 0.0), (6, 0.001)]),
    AttentionFormula(0.0, 0.0, 1e-6, 0.0, {(1, 0): 1e-7}),
    host=HostCost(schedule=(0.0006, 0.0001), after=(0.0004, 0.0)),
)  # fmt: skip


def recorded_run(policy: str, load: float, *, start: float = 0.0, overlap: bool = False) -> RecordedRun:
    rng, now, arrivals = random.Random(5), 0.0, []
    for index in range(40):
        now += rng.expovariate(RATE * load)
        prompt = [rng.randrange(256) for _ in range(rng.randrange(2, 90))]
        sampling = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True)
        arrivals.append(Arrival(now, f"r{index}", prompt, sampling))
    config = EngineConfig(**{**CONFIG.__dict__, "overlap": overlap})
    clock = VirtualClock(start)
    engine = simulated_engine(config, schedulers.create(policy), ProfiledCost(PROFILE), clock=clock)
    report = replay(engine, arrivals)
    return record_run(engine.records, report, scheduler=policy, load=load, rate=RATE * load, disturbed=0.0)


def recording(*, start: float = 0.0, overlap: bool = False) -> Recording:
    runs = [
        recorded_run(policy, load, start=start, overlap=overlap)
        for load in (0.5, 0.8, 0.95)
        for policy in ("fcfs", "sjf", "chunked_prefill")
    ]
    config = EngineConfig(**{**CONFIG.__dict__, "overlap": overlap})
    return Recording("m", {"gpu": "planted"}, config, RATE, runs)
