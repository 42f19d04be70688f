"""Every policy, reservation, victim rule and way of preempting: outputs as alone, no leak, an end, replay, reasons."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from typing import Any

import pytest

import schedulers
from research_engine.engine.decision_log import DecisionLog, ReplayScheduler
from research_engine.engine.records import StepRecord
from research_engine.engine.reservation import RESERVATIONS
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


def crowd(
    name: str,
    rule: str | None,
    way: str,
    reservation: str,
    seed: int,
    decisions: DecisionLog | None = None,
    replayed: DecisionLog | None = None,
) -> list[StepRecord]:
    """Several long requests in a cache that barely holds one, with small steps; returns the records of the steps.

    This is where policies that take each other's blocks in turn would never end.

    Args:
        decisions: takes the decisions down.
        replayed: decisions to take again, instead of asking the policy.
    """
    rng = random.Random(seed)
    size = rng.randint(1, 4)
    blocks = rng.randint(5, 9)
    slots = blocks * size
    scheduler = policy(name, rule, way, rng)
    engine = make_engine(
        scheduler if replayed is None else ReplayScheduler(replayed.decisions),
        clock=ManualClock(rng.choice([0.001, 0.1, 1.0])),
        decisions=decisions,
        num_blocks=blocks,
        block_size=size,
        num_host_blocks=rng.choice([0, blocks, 3 * blocks]),
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.randint(1, 12),
        max_model_len=rng.choice([slots + 1, slots // 2 + 2]),
        enable_prefix_caching=rng.random() < 0.5,
        reservation=reservation,
        stall_limit=500,
    )
    longest = min(slots, engine.config.max_model_len - 1)
    requests = []
    for index in range(rng.randint(3, 7)):
        length = rng.randint(1, longest - 1)
        requests += engine.add_request(
            str(index),
            [rng.randrange(3) for _ in range(length)],
            greedy(rng.randint(1, longest - length + 1)),
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
    for step in engine.records.steps:
        assert sum(step.num_tokens) <= engine.config.max_num_batched_tokens
        assert step.num_running <= engine.config.max_num_seqs
        assert step.blocks_used + step.blocks_cached + step.blocks_free == blocks
    return engine.records.steps


@pytest.mark.parametrize("name", schedulers.available())
def test_outputs_are_those_of_each_request_alone_whatever_happens(name):
    """Random arrivals, aborts, shared prefixes, n > 1; books are balanced and plans checked in every step."""
    for reservation, rule, index in itertools.product(RESERVATIONS, RULES, range(5)):
        seed = seed_of(name, rule, reservation, index)
        way = WAYS[seed % 3]
        try:
            RandomRun(
                seed, lambda rng, rule=rule, way=way: policy(name, rule, way, rng), reservation=reservation
            ).finish()
        except Exception as error:
            what = f"{reservation}, {rule}, {way}, seed {seed}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", schedulers.available())
def test_everybody_ends_in_a_cache_that_barely_holds_one(name):
    """Progress for every reservation, victim rule and way of preempting, and both ways are taken."""
    modes: Counter[str] = Counter()
    for reservation, rule, way, index in itertools.product(RESERVATIONS, RULES, WAYS, range(8)):
        if reservation != "paged" and index >= 2:  # they reserve, so less happens
            continue
        seed = seed_of("crowd", name, rule, way, reservation, index)
        try:
            steps = crowd(name, rule, way, reservation, seed)
        except Exception as error:
            what = f"{reservation}, {rule}, {way}, seed {seed}"
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        modes.update(p.mode for step in steps for p in step.preemptions)
    if name != "orca":  # it reserves, so that it never has to
        assert min(modes["recompute"], modes["swap"]) > 2, modes
    else:
        assert not modes


@pytest.mark.parametrize("name", schedulers.available())
def test_the_same_arrivals_give_the_same_decisions(name, tmp_path):
    """No wall clock, no order of a set, nothing left over from another run; explaining changes nothing, and decisions
    read from a file give the same run again without the policy."""
    for reservation in RESERVATIONS:
        for rule, way in random.Random(name + reservation).sample(COMBINATIONS, 3):
            seed = seed_of("replay", name, rule, way, reservation)
            log, again = DecisionLog(), DecisionLog()
            plain = crowd(name, rule, way, reservation, seed)
            assert crowd(name, rule, way, reservation, seed, decisions=log) == plain
            log.write(tmp_path / "log.jsonl")
            kept = DecisionLog.read(tmp_path / "log.jsonl")
            assert crowd(name, rule, way, reservation, seed, decisions=again, replayed=kept) == plain
            assert again.decisions == log.decisions


@pytest.mark.parametrize("name", schedulers.available())
def test_every_decision_has_its_reasons(name):
    """Whoever was there and got nothing has a reason, and whoever was admitted or preempted, too, with numbers."""
    said: Counter[str] = Counter()
    for seed in range(20):
        log = DecisionLog()
        steps = crowd(name, None, "recompute", "paged", seed, decisions=log)
        by_step = {step.step: step for step in steps}
        running: set[str] = set()
        for decision in log.decisions:
            got, gone = {name for name, _ in decision.tokens}, {p.request_id for p in decision.preempt}
            for request_id in (got - running) | gone:
                assert decision.reasons[request_id].startswith("gives way" if request_id in gone else "admitted")
                assert decision.seen[request_id]
            step = by_step.get(decision.step)
            if step is not None and step.num_waiting:
                assert decision.rest or decision.reasons
            assert all(reason and request_id in decision.seen for request_id, reason in decision.reasons.items())
            running = (running | got) - gone
            said.update(
                text.partition(":")[0].partition(" ")[0] for text in (*decision.reasons.values(), decision.rest)
            )
    assert said["admitted"] > 60 and said["waits"] > 30, said


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
