"""vllm_v0: prompts or decodes, never both; prompts first."""

from __future__ import annotations

import random

import pytest

from schedulers.vllm_v0 import VLLMV0
from tests.engine.shadow import drain, greedy, make_engine


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_no_step_mixes_prompts_and_decodes(preemption):
    """Random lengths and arrivals, a small pool, whichever way victims go."""
    preemptions = 0
    for seed in range(40):
        rng = random.Random(seed)
        policy = VLLMV0(preemption=preemption, watermark=0.0)
        engine = make_engine(policy, num_blocks=8, num_host_blocks=16, enable_prefix_caching=False)
        for i in range(8):
            engine.add_request(str(i), range(rng.randint(2, 12)), greedy(rng.randint(1, 12)))
            if rng.random() < 0.5:
                engine.step()
        drain(engine)
        for batch in engine.executor.batches:
            kinds = {row.num_tokens == 1 and row.start >= row.request.num_prompt_tokens for row in batch.rows}
            assert len(kinds) == 1
        preemptions += sum(len(step.preemptions) for step in engine.records.steps)
    assert preemptions > 10


def test_a_prompt_goes_before_the_decodes_as_soon_as_it_fits(rows):
    engine = make_engine(VLLMV0())
    engine.add_request("runs", range(4), greedy(4))
    engine.step()
    engine.step()
    engine.add_request("comes", range(50, 60), greedy(3))
    drain(engine)
    assert rows(engine)[:4] == [{"runs": 4}, {"runs": 1}, {"comes": 10}, {"runs": 1, "comes": 1}]


def test_new_prompts_wait_until_swapped_requests_are_back():
    engine = make_engine(VLLMV0(preemption="swap", watermark=0.0), num_blocks=4, num_host_blocks=8)
    for name in "ab":
        engine.add_request(name, range(ord(name), ord(name) + 8), greedy(9))
    while not any(step.preemptions for step in engine.records.steps):
        engine.step()
    engine.add_request("new", [1], greedy(1))
    drain(engine)
    steps = [step.request_ids for step in engine.records.steps]
    back = next(i for i, step in enumerate(engine.records.steps) if step.blocks_swapped_in)
    assert next(i for i, ids in enumerate(steps) if "new" in ids) > back


@pytest.mark.parametrize(("swap_groups", "modes"), [(True, {"swap"}), (False, {"recompute"})])
def test_continuations_of_one_prompt_are_swapped(swap_groups, modes):
    policy = VLLMV0(swap_groups=swap_groups, watermark=0.0)
    engine = make_engine(policy, num_blocks=5, num_host_blocks=8)
    engine.add_request("g", range(6), greedy(8, n=3))
    drain(engine)
    assert {p.mode for step in engine.records.steps for p in step.preemptions} == modes
