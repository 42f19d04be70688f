"""Small simulated engines and workloads for cluster tests."""

from __future__ import annotations

import random

import schedulers
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import Batch
from research_engine.engine.driver import Arrival
from research_engine.engine.engine import Engine
from research_engine.engine.sampling_params import SamplingParams
from research_engine.simulation.build import simulated_engine
from research_engine.simulation.cost_model import StepTime


class Simple:
    """8 ms of the device and 1 ms a token, 0.1 ms for a decode; 2.5 ms of the host, 0.5 of them after the tokens."""

    def seconds(self, batch: Batch) -> float:
        return self.step_time(batch).total

    def step_time(self, batch: Batch) -> StepTime:
        device = 0.008 + sum(0.001 * row.num_tokens if row.num_tokens > 1 else 0.0001 for row in batch.rows)
        return StepTime(0.002, 0.001, device, 0.0005)


def make(policy: str = "chunked_prefill", **sizes) -> Engine:
    defaults = {"num_blocks": 60, "block_size": 4, "num_host_blocks": 60, "max_num_seqs": 8, "max_model_len": 200,
                "max_num_batched_tokens": 64, "check_integrity": True}  # fmt: skip
    return simulated_engine(EngineConfig(**{**defaults, **sizes}), schedulers.create(policy), Simple())


def workload(count: int, rate: float, seed: int = 0, longest: int = 60) -> list[Arrival]:
    rng, now, made = random.Random(seed), 0.0, []
    for index in range(count):
        now += rng.expovariate(rate)
        prompt = [rng.randrange(1000) for _ in range(rng.randrange(1, longest))]
        sampling = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True)
        made.append(Arrival(now, f"r{index}", prompt, sampling, priority=rng.randrange(3), client=str(index % 3)))
    return made
