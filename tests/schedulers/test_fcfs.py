"""fcfs: by arrival, whole prompts, prefill before decode."""

from __future__ import annotations

import random

from schedulers.fcfs import FCFS
from tests.engine.shadow import ManualClock, drain, greedy, make_engine


def test_first_tokens_come_in_the_order_of_arrival(rows):
    """Random lengths, a small pool and few seats: whoever arrived first is scheduled and answered first."""
    for seed in range(40):
        rng = random.Random(seed)
        clock = ManualClock(0.01)
        engine = make_engine(FCFS(), clock=clock, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=40)
        requests = []
        for i in range(8):
            prompt = [rng.randrange(1000) for _ in range(rng.randint(1, 30))]
            requests += engine.add_request(str(i), prompt, greedy(rng.randint(1, 12)))
            if rng.random() < 0.5:
                engine.step()
        drain(engine)
        times = [(r.first_scheduled_time, r.first_token_time) for r in requests]
        assert times == sorted(times)


def test_a_prompt_is_computed_in_one_step_unless_it_alone_exceeds_the_budget(rows):
    """It waits for a step with room rather than being split; the one larger than any step is split, alone in it."""
    engine = make_engine(FCFS(), max_num_batched_tokens=16, num_blocks=32)
    for name, prompt in (("a", range(10)), ("b", range(100, 110)), ("long", range(200, 240))):
        engine.add_request(name, prompt, greedy(3))
    drain(engine)
    steps = rows(engine)
    assert steps[0] == {"a": 10} and steps[1]["b"] == 10
    chunks = [step for step in steps if step.get("long", 0) > 1]
    assert [step["long"] for step in chunks] == [16, 16, 8]
    assert chunks[0] == {"long": 16} and chunks[1] == {"long": 16}


def test_a_prompt_goes_before_the_decodes_of_its_step(rows):
    """A long prompt takes the budget, and the running request gets no token: the stall that chunking cures."""
    engine = make_engine(FCFS(), max_num_batched_tokens=16)
    engine.add_request("runs", range(4), greedy(6))
    engine.step()
    engine.add_request("prompt", range(50, 66), greedy(2))
    engine.step()
    assert rows(engine)[1] == {"prompt": 16}
    drain(engine)
    assert rows(engine)[2] == {"runs": 1, "prompt": 1}


def test_the_last_admitted_gives_way_when_blocks_run_out():
    engine = make_engine(FCFS(watermark=0.0), num_blocks=3, enable_prefix_caching=False)
    for name in ("first", "last"):
        engine.add_request(name, range(4), greedy(6))
    drain(engine)
    gone = [p.request_id for s in engine.records.steps for p in s.preemptions]
    assert gone and set(gone) == {"last"}
    assert [r.request_id for r in engine.records.requests] == ["first", "last"]


def test_later_requests_pass_one_that_does_not_fit_only_when_overtaking_is_on(rows):
    """Head-of-line blocking is a choice."""
    first_steps = []
    for overtaking in (False, True):
        engine = make_engine(FCFS(overtaking=overtaking, watermark=0.0), num_blocks=6)
        engine.add_request("runs", range(8), greedy(8))
        engine.step()
        engine.add_request("large", range(50, 70), greedy(1))
        engine.add_request("small", range(80, 84), greedy(1))
        engine.step()
        first_steps.append(rows(engine)[1])
        drain(engine)
    assert first_steps == [{"runs": 1}, {"small": 4, "runs": 1}]


def test_the_watermark_keeps_blocks_for_those_that_run():
    """With a third of the blocks kept, nobody is preempted where without it somebody is."""
    preemptions = []
    for watermark in (0.0, 0.34):
        engine = make_engine(FCFS(watermark=watermark), num_blocks=6, enable_prefix_caching=False)
        for i in range(4):
            engine.add_request(str(i), range(8), greedy(6))
        drain(engine)
        preemptions.append(sum(len(s.preemptions) for s in engine.records.steps))
    assert preemptions[0] > 0 and preemptions[1] == 0


def test_swap_falls_back_to_recompute_when_the_host_has_no_room():
    modes = []
    for host in (8, 1):
        engine = make_engine(FCFS(preemption="swap", watermark=0.0), num_blocks=4, num_host_blocks=host)
        for name in "ab":
            engine.add_request(name, range(ord(name), ord(name) + 8), greedy(4))
        drain(engine)
        modes.append({p.mode for s in engine.records.steps for p in s.preemptions})
    assert modes == [{"swap"}, {"recompute"}]
