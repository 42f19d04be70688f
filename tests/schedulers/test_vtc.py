"""vtc: equal service to clients that always want more, within the theorem's bound, and no credit for idling."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedulers.vtc import VTC
from tests.engine.shadow import drain, greedy, make_engine


def backlogged(policy, seed: int, steps: int = 400, weights: tuple[float, float] = (1.0, 2.0)):
    """Two clients that always have requests waiting, of unlike sizes; yields both services after every step."""
    rng, (weight_input, weight_output) = random.Random(seed), weights
    longest = {client: rng.randint(1, 10) for client in "fg"}
    most = {client: rng.randint(1, 20) for client in "fg"}
    engine = make_engine(policy, num_blocks=16, max_num_seqs=rng.randint(1, 6), max_num_batched_tokens=40)
    added, service, charged = Counter(), Counter(), set()
    for _ in range(steps):
        waiting = Counter(r.client for r in engine.view().waiting)
        for client in "fg":
            for _ in range(8 - waiting[client]):
                added[client] += 1
                prompt = [rng.randrange(1000) for _ in range(rng.randint(1, longest[client]))]
                name = f"{client}{added[client]}"
                engine.add_request(name, prompt, greedy(rng.randint(1, most[client])), client=client)
        lengths = {r.id: r.num_prompt_tokens for r in (*engine.view().running, *engine.view().waiting)}
        engine.step()
        step = engine.records.steps[-1]
        for name, drew in zip(step.request_ids, step.drew, strict=True):
            service[name[0]] += weight_output * drew + weight_input * (lengths[name] if name not in charged else 0)
            charged.add(name)
        yield service["f"], service["g"], max(longest.values()), engine.config.num_slots


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    weights=st.sampled_from([(1.0, 2.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.5, 4.0)]),
)
def test_the_services_of_backlogged_clients_never_part_by_more_than_the_bound(seed, weights):
    """|W_f - W_g| <= 2 max(w_p L_input, w_q M), the paper's theorem 4.4, after every step and for any weights."""
    weight_input, weight_output = weights
    policy = VTC(weight_input=weight_input, weight_output=weight_output)
    for own, other, longest, slots in backlogged(policy, seed, 80, weights):
        assert abs(own - other) <= 2 * max(weight_input * longest, weight_output * slots)
    assert min(own, other) > 0


def test_the_gap_comes_near_the_bound_and_services_go_on_for_ever():
    """The property above is no matter of short runs: long ones use much of the bound and never pass it."""
    widest = 0.0
    for seed in range(8):
        for own, other, longest, slots in backlogged(VTC(), seed):
            gap, bound = abs(own - other), 2 * max(longest, 2 * slots)
            assert gap <= bound
            widest = max(widest, gap / bound)
        assert min(own, other) > 300
    assert widest > 0.2


def test_the_bound_is_one_that_first_come_first_served_breaks():
    """What the property above is worth: a client with ten times the work gets ten times the service."""
    from schedulers.fcfs import FCFS

    gaps = [max(abs(own - other) for own, other, *_ in backlogged(FCFS(), seed, 1200)) for seed in range(4)]
    assert max(gaps) > 2 * 2 * 64


def test_the_client_with_the_smallest_counter_goes_next():
    """Prompts of 8 against 2 tokens, one output each: (8 + 2) against (2 + 2) a request."""
    engine = make_engine(VTC(), max_num_seqs=1)
    for i in range(4):
        engine.add_request(f"a{i}", range(100 * i, 100 * i + 8), greedy(1), client="a")
    for i in range(8):
        engine.add_request(f"b{i}", range(1000 * i, 1000 * i + 2), greedy(1), client="b")
    drain(engine)
    order = [r.request_id for r in engine.records.requests]
    # counters (a, b) after each: 10,0 10,4 10,8 10,12 20,12 20,16 20,20 30,20 30,24 30,28 30,32 40,32
    assert order == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "a2", "b5", "b6", "b7", "a3"]


def test_several_admissions_in_one_step_are_charged_one_after_the_other(rows):
    engine = make_engine(VTC(), max_num_seqs=3)
    for name, length in (("a1", 8), ("a2", 8), ("a3", 8), ("b1", 3), ("b2", 3)):
        engine.add_request(name, range(ord(name[0]), ord(name[0]) + length), greedy(1), client=name[0])
    engine.step()
    assert list(rows(engine)[0]) == ["a1", "b1", "b2"]
    drain(engine)


def test_a_client_that_comes_back_from_idleness_brings_no_credit():
    """Its counter is lifted to the least of those that wait, so it takes turns with them at once."""
    policy = VTC()
    engine = make_engine(policy, max_num_seqs=1)
    engine.add_request("idle", [1], greedy(1), client="idle")
    for i in range(20):
        engine.add_request(f"busy {i}", [i], greedy(1), client="busy")
    for _ in range(12):
        engine.step()
    assert policy.counters["busy"] > 30
    for i in range(6):
        engine.add_request(f"back {i}", [50 + i], greedy(1), client="idle")
    assert policy.counters["idle"] == policy.counters["busy"]
    for _ in range(8):
        engine.step()
    names = [r.request_id.split()[0] for r in engine.records.requests[-8:]]
    assert names.count("back") == 4
    drain(engine)


def test_into_an_empty_queue_a_client_comes_at_the_counter_of_who_left_last():
    policy = VTC()
    engine = make_engine(policy, max_num_seqs=1)
    engine.add_request("a", range(10), greedy(5), client="a")
    engine.step()
    assert not engine.view().waiting
    left_at = policy.counters["a"]
    engine.add_request("b", [1], greedy(1), client="b")
    assert policy.counters["b"] == left_at == 12
    drain(engine)


def test_recompute_is_charged_to_nobody():
    policy = VTC(watermark=0.0)
    engine = make_engine(policy, num_blocks=4, enable_prefix_caching=False)
    for name in "ab":
        engine.add_request(name, range(4), greedy(9), client=name)
    drain(engine)
    assert any(step.preemptions for step in engine.records.steps)
    assert policy.counters == {"a": 4 + 2 * 9, "b": 4 + 2 * 9}


def test_the_weights_are_what_tokens_count():
    policy = VTC(weight_input=0.5, weight_output=3.0)
    engine = make_engine(policy)
    engine.add_request("a", range(10), greedy(5), client="a")
    drain(engine)
    assert policy.counters == {"a": 0.5 * 10 + 3.0 * 5}
    with pytest.raises(ValueError, match="weight_output = -1: must be >= 0"):
        VTC(weight_output=-1)
