"""Every policy, victim rule and way of preempting: outputs as alone, nothing leaks, everybody ends, replay."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from typing import Any

import pytest

import schedulers
from schedulers.victims import VICTIM_RULES
from tests.engine.random_runs import RandomRun
from tests.engine.shadow import ManualClock, assert_empty, drain, expected, greedy, make_engine

RULES = [None, *VICTIM_RULES]
WAYS = ["recompute", "swap", "cheaper"]
COMBINATIONS = [(rule, way) for rule in RULES for way in WAYS]
OWN = {  # parameters at which small workloads go through all that a policy does
    "chunked_prefill": {"token_budget": [0, 3]},
    "deficit_round_robin": {"quantum": [1.0, 30.0]},
    "edf": {"default_slo": [0.5, 1e9]},
    "hybrid_lookahead": {"lookahead": [0, 1, 8], "max_passes": [0, 2, 16]},
    "mlfq": {"levels": [1, 3], "quantum": [1, 4], "growth": [1.0, 2.0], "starvation": [0.01, 1.0, 1e9]},
    "orca": {"max_batch_size": [0, 2]},
    "prefix_aware": {"ageing": [0.0, 1.0], "window": [1, 4]},
    "priority": {"ageing": [0.01, 1.0, 1e9]},
    "sjf": {"ageing": [0.0, 1.0, 100.0], "window": [0, 2, 64]},
    "slo_aware": {"ttft": [0.0, 1.0], "tpot": [0.0, 0.1, 1.0], "lead": [0.0, 0.5]},
    "srpt": {"ageing": [0.0, 1.0, 100.0], "window": [0, 2, 64]},
    "static_batch": {"batch_size": [0, 2]},
    "vllm_v0": {"swap_groups": [True, False]},
    "vtc": {"weight_input": [0.0, 1.0], "weight_output": [0.0, 2.0]},
}


def seed_of(*what: Any) -> int:
    """The same in every process."""
    return zlib.crc32(repr(what).encode())


def policy(name: str, rule: str | None, way: str, rng: random.Random) -> Any:
    return schedulers.create(
        name,
        victim_rule=rule,
        preemption=way,
        swap_seconds=rng.choice([1e-5, 5e-4]),
        watermark=rng.choice([0.0, 0.01, 0.3]),
        admission=rng.choice(["whole", "chunk"]),
        overtaking=rng.random() < 0.3,
        **{parameter: rng.choice(values) for parameter, values in OWN.get(name, {}).items()},
    )


def crowd(name: str, rule: str | None, way: str, seed: int) -> list[tuple]:
    """Several long requests in a cache that barely holds one, with small steps; returns who did what, step by step.

    This is where policies that take each other's blocks in turn would never end.
    """
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    blocks = rng.randint(5, 9)
    slots = blocks * size
    engine = make_engine(
        policy(name, rule, way, rng),
        clock=ManualClock(rng.choice([0.001, 0.1, 1.0])),
        num_blocks=blocks,
        block_size=size,
        num_host_blocks=rng.choice([0, blocks, 3 * blocks]),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.randint(1, 12),
        enable_prefix_caching=rng.random() < 0.5,
        stall_limit=500,
    )
    requests = []
    for index in range(rng.randint(3, 7)):
        length = rng.randint(1, slots - 2)
        requests += engine.add_request(
            str(index),
            [rng.randrange(3) for _ in range(length)],
            greedy(rng.randint(1, slots - length + 1)),
            priority=rng.randint(0, 2),
            client=rng.choice("abc"),
            deadline=rng.choice([None, rng.random() * 20]),
            predicted_tokens=rng.choice([None, rng.randint(1, slots)]),
        )
        if rng.random() < 0.5:
            engine.step()
    drain(engine, most=20_000)
    assert_empty(engine)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]
    return [(s.started, s.request_ids, s.num_tokens, s.preemptions) for s in engine.records.steps]


@pytest.mark.parametrize("name", schedulers.available())
def test_outputs_are_those_of_each_request_alone_whatever_happens(name):
    """Random arrivals, aborts, shared prefixes, n > 1; books are balanced and plans checked in every step."""
    for rule, way in COMBINATIONS:
        for index in range(6):
            seed = seed_of(name, rule, way, index)
            try:
                RandomRun(seed, lambda rng, rule=rule, way=way: policy(name, rule, way, rng)).finish()
            except Exception as error:
                raise AssertionError(f"{rule}, {way}, seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", schedulers.available())
def test_everybody_ends_in_a_cache_that_barely_holds_one(name):
    """Progress for every victim rule and way of preempting, and both are reached."""
    modes: Counter[str] = Counter()
    for rule, way in COMBINATIONS:
        for index in range(14):
            seed = seed_of("crowd", name, rule, way, index)
            try:
                steps = crowd(name, rule, way, seed)
            except Exception as error:
                raise AssertionError(f"{rule}, {way}, seed {seed}: {type(error).__name__}: {error}") from error
            modes.update(p.mode for step in steps for p in step[3])
    if name != "orca":  # it reserves, so that it never has to
        assert min(modes["recompute"], modes["swap"]) > 5, modes
    else:
        assert not modes


@pytest.mark.parametrize("name", schedulers.available())
def test_the_same_arrivals_give_the_same_decisions(name):
    """Replay: no wall clock, no order of a set, nothing left over from another run."""
    for rule, way in random.Random(name).sample(COMBINATIONS, 6):
        seed = seed_of("replay", name, rule, way)
        assert crowd(name, rule, way, seed) == crowd(name, rule, way, seed)


@pytest.mark.parametrize("name", ["fcfs", "chunked_prefill", "orca", "static_batch", "vllm_v0", "slo_aware"])
def test_nobody_who_arrives_later_is_admitted_first(name):
    """The bound that these policies claim; random lengths in a small pool, whichever way victims go."""
    for seed in range(30):
        rng = random.Random(seed)
        policy = schedulers.create(name, preemption=rng.choice(WAYS), victim_rule=rng.choice(RULES))
        engine = make_engine(policy, clock=ManualClock(0.01), num_blocks=12, num_host_blocks=12, max_num_seqs=3)
        requests = []
        for i in range(8):
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
            requests += engine.add_request(str(i), prompt, greedy(rng.randint(1, 12)))
            if rng.random() < 0.5:
                engine.step()
        drain(engine)
        times = [r.first_scheduled_time for r in requests]
        assert times == sorted(times)
