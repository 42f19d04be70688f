"""What steps and requests leave behind adds up: hit rates, recompute, times, slots and blocks."""

from __future__ import annotations

import random

import pytest

from research_engine.engine.contract import EngineView, SchedulePlan, TokenLogprobs
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.fcfs import FCFS

from .random_policies import RandomPolicy
from .shadow import ManualClock, drain, greedy, make_engine


def small_and_crowded(seed: int, **sizes):
    """A pool too small for its requests: random prompts, preemption by recompute and swap."""
    rng = random.Random(seed)
    engine = make_engine(
        RandomPolicy(rng, 0.1, 0.1, 0.5),
        **{"num_blocks": 8, "num_host_blocks": 4, "stall_limit": 2000, "clock": ManualClock(0.01), **sizes},
    )
    for i in range(6):
        prompt = [1000 * i + rng.randrange(1000) for _ in range(rng.randint(1, 12))]
        engine.add_request(str(i), prompt, greedy(rng.randint(1, 10)))
    drain(engine)
    return engine


def test_random_prompts_have_no_hits_and_recompute_is_counted_apart():
    """S23: a preempted request that finds its own blocks again is no cache hit."""
    found_own = 0
    for seed in range(30):
        engine = small_and_crowded(seed)
        assert [r.cached_tokens for r in engine.records.requests] == [0] * 6
        lost = sum(p.tokens_lost for s in engine.records.steps for p in s.preemptions)
        found_own += lost - sum(r.recomputed_tokens for r in engine.records.requests)
    assert found_own > 0, "no preempted request found its own blocks: the case was not reached"


def test_each_preemption_records_what_is_lost_and_what_is_lost_is_what_is_recomputed():
    """S27: without a prefix cache, tokens lost per event add up to the tokens computed again, request by request."""
    events = 0
    for seed in range(30):
        engine = small_and_crowded(seed, enable_prefix_caching=False)
        for record in engine.records.requests:
            own = [p for s in engine.records.steps for p in s.preemptions if p.request_id == record.request_id]
            events += len(own)
            assert record.preemptions == len(own)
            assert record.recomputed_tokens == sum(p.tokens_lost for p in own)
            assert all(p.tokens_lost == 0 and p.blocks_swapped > 0 for p in own if p.mode == "swap")
            assert all(p.blocks_swapped == 0 for p in own if p.mode == "recompute")
    assert events > 100


def test_each_known_token_but_the_last_is_computed_once_or_counted_as_recomputed():
    """Per request, over random runs of prompts that share nothing: step records and request records agree."""
    for seed in range(60):
        engine = small_and_crowded(seed)
        for record in engine.records.requests:
            rows = [
                (count, drew)
                for s in engine.records.steps
                for name, count, drew in zip(s.request_ids, s.num_tokens, s.drew, strict=True)
                if name == record.request_id
            ]
            known = record.prompt_tokens + record.output_tokens - 1
            assert sum(count for count, _ in rows) == known + record.recomputed_tokens
            assert sum(drew for _, drew in rows) == record.output_tokens


def test_prompt_log_probabilities_are_collected_once_over_chunks_and_preemptions():
    """Each prompt token but the first has one entry, in order, however often its row was computed."""
    for seed in range(20):
        rng = random.Random(seed)
        engine = make_engine(RandomPolicy(rng, 0.2, 0.1, 0.2), num_blocks=8, stall_limit=2000)
        execute = engine.executor.execute

        def with_logprobs(batch, execute=execute):
            result = execute(batch)
            result.prompt_logprobs = {
                index: [TokenLogprobs(token_id, -1.0, 1, ()) for token_id in predicted]
                for index, row in enumerate(batch.rows)
                if (predicted := row.request.prompt_token_ids[row.start + 1 : row.start + row.num_tokens + 1])
            }
            return result

        engine.executor.execute = with_logprobs  # type: ignore[method-assign]
        requests = [
            engine.add_request(str(i), range(1000 * i, 1000 * i + rng.randint(1, 14)), greedy(4, prompt_logprobs=0))[0]
            for i in range(4)
        ]
        drain(engine)
        for request in requests:
            assert [entry.token_id for entry in request.prompt_logprobs] == request.prompt_token_ids[1:]


def test_blocks_and_slots_of_every_step_add_up():
    for seed in range(20):
        engine = small_and_crowded(seed)
        for step in engine.records.steps:
            assert step.blocks_used + step.blocks_cached + step.blocks_free == 8
            assert 0 <= step.slots_stored <= step.blocks_used * 4
            assert step.started < step.committed < step.executed < step.finished
            assert len(step.request_ids) == len(step.starts) == len(step.num_tokens) == len(step.drew)
        assert sum(s.blocks_swapped_in for s in engine.records.steps) == sum(
            p.blocks_swapped for s in engine.records.steps for p in s.preemptions
        )


def test_times_of_a_request_are_those_of_its_steps():
    """First scheduled when its first step began, first token when its executor returned; arrival as scheduled."""
    engine = make_engine(ChunkedPrefill(), clock=ManualClock(1.0), max_num_batched_tokens=4)
    (request,) = engine.add_request("r", range(7), greedy(2), arrival_time=-5.0)
    drain(engine)
    first, second, last = engine.records.steps
    (record,) = engine.records.requests
    assert (first.num_tokens, second.num_tokens, second.drew) == ([4], [3], [True])
    assert record.arrival_time == -5.0 and record.first_scheduled_time == first.started
    assert record.first_token_time == second.executed
    assert record.last_token_time == record.finish_time == last.executed
    assert request.finish_reason == record.finish_reason == "length"


def test_an_idle_step_leaves_no_record():
    engine = make_engine(FCFS())
    assert engine.step() == [] and engine.idle and engine.records.steps == []


def test_the_view_is_what_the_engine_holds():
    """What a policy sees of running, waiting and blocks is true at that moment."""
    seen = []

    class Looks(FCFS):
        def schedule(self, view: EngineView) -> SchedulePlan:
            seen.append((view.step, view.now, view.num_running, view.num_waiting, view.num_free_blocks))
            assert (len(view.running), len(view.waiting)) == (view.num_running, view.num_waiting)
            assert view.blocks_freed_by(view.running[0]) == 2 if view.running else True
            return super().schedule(view)

    engine = make_engine(Looks(), max_num_seqs=1, clock=ManualClock(1.0))
    for name in "ab":
        engine.add_request(name, range(7), greedy(2))
    drain(engine)
    assert [entry[0] for entry in seen] == [0, 1, 2, 3]
    assert [entry[2:] for entry in seen] == [(0, 2, 16), (1, 1, 14), (0, 1, 16), (1, 0, 14)]
    assert [entry[1] for entry in seen] == [s.started for s in engine.records.steps]


@pytest.mark.parametrize("seed", range(3))
def test_equal_runs_leave_equal_records(seed):
    """Nothing in the core depends on hash order, object identity or wall time."""
    assert small_and_crowded(seed).records == small_and_crowded(seed).records
