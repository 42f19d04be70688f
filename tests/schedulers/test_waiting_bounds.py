"""Every policy that claims a bound on waiting states it in its docstring, and is held to it under hostile arrivals."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import schedulers
from research_engine.engine.contract import Request
from schedulers.registry import BUILT_IN, find
from schedulers.victims import predicted_outputs_left
from tests.engine.shadow import ManualClock, drain, greedy, make_engine

LONGEST = 40  # max_model_len
AGEING = 20.0
Allowed = Callable[[Request, Request], bool]


def never(first: Request, later: Request) -> bool:
    return False


def within_its_size(first: Request, later: Request) -> bool:
    size = first.num_prompt_tokens + predicted_outputs_left(first) + first.num_output_tokens
    return later.arrival_time - first.arrival_time <= size / AGEING


def within_its_level(first: Request, later: Request) -> bool:
    return later.arrival_time - first.arrival_time <= AGEING * (first.priority - later.priority)


def due(request: Request) -> float:
    return request.arrival_time + 3.0 if request.deadline is None else request.deadline


OVERTAKING: dict[str, tuple[dict[str, float], Allowed]] = {  # who may be admitted before one that arrived earlier
    "fcfs": ({}, never),
    "chunked_prefill": ({}, never),
    "orca": ({}, never),
    "static_batch": ({}, never),
    "vllm_v0": ({}, never),
    "slo_aware": ({"ttft": 1.0}, never),
    "sjf": ({"ageing": AGEING}, within_its_size),
    "srpt": ({"ageing": AGEING}, within_its_size),
    "priority": ({"ageing": AGEING}, within_its_level),
    "prefix_aware": (
        {"ageing": AGEING},
        lambda first, later: later.arrival_time - first.arrival_time <= LONGEST / AGEING,
    ),
    "edf": ({"default_slo": 3.0}, lambda first, later: due(later) <= due(first)),
}
ELSEWHERE = {  # bounds of another kind, with their tests
    "hybrid_lookahead": "test_at_most_max_passes_requests_are_admitted_past_one_that_waits",
    "mlfq": "test_a_request_is_served_soon_after_the_starvation_limit",
    "vtc": "test_the_services_of_backlogged_clients_never_part_by_more_than_the_bound",
    "deficit_round_robin": "test_between_two_turns_of_a_client_the_others_get_a_quantum_each",
}


def overtakings(policy: object, seed: int, allowed: Allowed) -> tuple[int, list[str]]:
    """How often somebody was admitted before one that had arrived earlier, and the cases that may not be.

    A steady stream of small urgent requests with near deadlines meets large ones, in a cache that holds two of those.
    """
    rng = random.Random(seed)
    engine = make_engine(
        policy, clock=ManualClock(0.02), num_blocks=20, block_size=4, max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=32, max_model_len=LONGEST, enable_prefix_caching=rng.random() < 0.5, num_host_blocks=20,
    )  # fmt: skip
    requests: list[Request] = []
    for index in range(40):
        large = rng.random() < 0.25
        prompt = [rng.randrange(3) for _ in range(rng.randint(20, 30) if large else rng.randint(1, 4))]
        output = rng.randint(3, 9) if large else rng.randint(1, 3)
        now = engine.clock.now()
        requests += engine.add_request(
            str(index), prompt, greedy(output), priority=2 * large, predicted_tokens=output,
            deadline=rng.choice([None, now + rng.random() * (8 if large else 2)]),
        )  # fmt: skip
        for _ in range(rng.randint(0, 2)):
            engine.step()
    drain(engine)
    count, wrong = 0, []
    for at, first in enumerate(requests):
        for later in requests[at + 1 :]:
            if later.first_scheduled_time < first.first_scheduled_time:
                count += 1
                if not allowed(first, later):
                    wrong.append(f"{later!r} of {later.arrival_time} before {first!r} of {first.arrival_time}")
    return count, wrong


@pytest.mark.parametrize("name", OVERTAKING)
def test_nobody_is_passed_by_more_than_the_docstring_says(name: str) -> None:
    parameters, allowed = OVERTAKING[name]
    passed = 0
    for seed in range(25):
        way = ("recompute", "swap", "cheaper")[seed % 3]
        count, wrong = overtakings(schedulers.create(name, preemption=way, **parameters), seed, allowed)
        assert not wrong, f"seed {seed}: {wrong[0]}"
        passed += count
    assert (passed > 0) == (allowed is not never)  # otherwise the bound was not put to the test


def test_the_bound_of_sjf_is_one_that_it_breaks_without_ageing() -> None:
    """What the property is worth: the same streams, with ageing turned off."""
    found = [overtakings(schedulers.create("sjf", ageing=0.0), seed, within_its_size)[1] for seed in range(25)]
    assert any(found)


def test_a_policy_that_claims_a_bound_has_its_test() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    claims = {name for name in BUILT_IN if re.search("bound", inspect.getdoc(find(name)) or "", re.IGNORECASE)}
    assert claims == set(OVERTAKING) | set(ELSEWHERE) == set(BUILT_IN)
    for test in ELSEWHERE.values():
        assert f"def {test}(" in text


def test_between_two_turns_of_a_client_the_others_get_a_quantum_each() -> None:
    """Deficit round robin: prompts of at most 12 tokens, answers of one; all clients always have requests waiting."""
    quantum, longest, clients = 16.0, 12, "abcd"
    for seed in range(10):
        rng = random.Random(seed)
        engine = make_engine(
            schedulers.create("deficit_round_robin", quantum=quantum), max_num_seqs=1, max_num_batched_tokens=16
        )
        count = 0
        served: list[tuple[str, int]] = []
        for _ in range(200):
            waiting = [request.client for request in engine.view().waiting]
            for client in clients:
                for _ in range(3 - waiting.count(client)):
                    count += 1
                    most = longest if client == "a" else rng.choice([1, 3, longest])
                    prompt = [rng.randrange(1000) for _ in range(rng.randint(1, most))]
                    engine.add_request(f"{client}{count}", prompt, greedy(1), client=client)
            engine.step()
            ended = engine.records.requests[len(served) :]
            served += [(record.client, record.prompt_tokens + 2 * record.output_tokens) for record in ended]
        for client in clients:
            turns = [at for at, (who, _) in enumerate(served) if who == client]
            for one, following in itertools.pairwise(turns):
                between = served[one + 1 : following]
                for other in set(clients) - {client}:
                    # a turn goes on while the deficit is above 0, so it may end with one request too much
                    got = sum(price for who, price in between if who == other)
                    assert got <= quantum + longest + 2, (seed, client, other, between)
