"""Whatever a policy does within the rules, every output is that of the request running alone, and nothing leaks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from research_engine.engine.contract import Scheduler
from research_engine.engine.reservation import RESERVATIONS
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.fcfs import FCFS
from schedulers.priority import Priority

from .random_policies import RandomPolicy
from .random_runs import RandomRun

KINDS = ("recomputes", "swaps", "copies", "hits", "evictions", "aborts", "chunks")


def random_policy(rng: random.Random) -> Scheduler:
    return RandomPolicy(rng, rng.choice([0.0, 0.05, 0.2]), rng.choice([0.0, 0.3]), rng.choice([0.0, 0.5, 1.0]))


def shipped_policy(rng: random.Random) -> Scheduler:
    common = {
        "watermark": rng.choice([0.0, 0.01, 0.3]),
        "admission": rng.choice(["whole", "chunk"]),
        "preemption": rng.choice(["recompute", "swap"]),
        "overtaking": rng.random() < 0.3,
    }
    return rng.choice([
        lambda: FCFS(**common),
        lambda: ChunkedPrefill(**common, token_budget=rng.choice([0, 1, 3, 16])),
        lambda: Priority(**common, ageing=rng.choice([0.01, 1.0, float("inf")])),
    ])()  # fmt: skip


def facts_of_runs(policy, seeds, **options) -> Counter[str]:
    """Finish the runs, with every check on the way; what they went through, summed."""
    facts: Counter[str] = Counter()
    for seed in seeds:
        run = RandomRun(seed, policy, **options)
        try:
            run.finish()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        facts.update(run.facts())
    return facts


@pytest.mark.parametrize(("policy", "seeds"), [(random_policy, range(2000)), (shipped_policy, range(10_000, 10_600))])
def test_any_schedule_gives_each_request_the_output_it_has_alone(policy, seeds):
    """Small caches, shared prefixes, n > 1, chunks, swap, recompute, aborts at any moment, ids used again."""
    facts = facts_of_runs(policy, seeds)
    for kind in KINDS:
        assert facts[kind] > 100, f"the runs hardly reached {kind}: {facts}"


@pytest.mark.parametrize(("policy", "seeds"), [(random_policy, range(800)), (shipped_policy, range(30_000, 30_400))])
def test_running_one_step_ahead_changes_no_output(policy, seeds):
    """The same runs with a step always in flight: stops found out late, preempted and aborted rows under way."""
    facts = facts_of_runs(policy, seeds, overlap=True)
    for kind in KINDS:
        assert facts[kind] > 50, f"the runs hardly reached {kind}: {facts}"


@pytest.mark.parametrize("reservation", RESERVATIONS[1:])
@pytest.mark.parametrize(
    ("policy", "seeds", "kinds"),
    [(random_policy, range(300), KINDS), (shipped_policy, range(20_000, 20_150), KINDS[3:])],  # hardly ever short
)
def test_a_reservation_changes_no_output(policy, seeds, kinds, reservation):
    """The same runs with blocks reserved for tokens to come, and predictions that may be wrong or missing."""
    facts = facts_of_runs(policy, seeds, reservation=reservation)
    for kind in kinds:
        assert facts[kind] > 10, f"the runs hardly reached {kind}: {facts}"
