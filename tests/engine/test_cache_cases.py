"""Blocks: who may be admitted, who finds whose prefix, when a block is taken, shared, copied and given back."""

from __future__ import annotations

from typing import Any

import pytest

from research_engine.engine.contract import EngineView, Preemption, SchedulePlan, Scheduler
from research_engine.engine.errors import RequestError, StalledError
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.fcfs import FCFS
from schedulers.priority import Priority

from .shadow import assert_empty, drain, expected, greedy, make_engine

ALL = [FCFS, ChunkedPrefill, Priority]


class Script(Scheduler):
    """Carries out one plan after the other."""

    def __init__(self, *plans: SchedulePlan) -> None:
        self.plans = list(plans)

    def schedule(self, view: EngineView) -> SchedulePlan:
        return self.plans.pop(0) if self.plans else SchedulePlan()


def starts(engine: Any) -> list[dict[str, int]]:
    """Per step: request id -> tokens that were there before."""
    return [dict(zip(s.request_ids, s.starts, strict=True)) for s in engine.records.steps]


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(
    ("prompt", "most", "numbers"), [(12, 1, "12 prompt"), (8, 4, "= 4 need 11 KV slots"), (8, 2, "= 2 need 9")]
)
def test_a_request_larger_than_the_cache_is_refused_and_the_queue_goes_on(policy, prompt, most, numbers):
    """S1: 2 blocks of 4; prompt 12, or prompt 8 and 4 output tokens, or one slot too many."""
    engine = make_engine(policy(), num_blocks=2)
    engine.add_request("before", [1, 2], greedy(2))
    with pytest.raises(RequestError, match=numbers) as caught:
        engine.add_request("big", range(prompt), greedy(most))
    assert "8 (2 blocks of 4)" in str(caught.value)
    (last,) = engine.add_request("fits exactly", range(8), greedy(1))
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["before", "fits exactly"]
    assert last.finish_reason == "length"


def test_a_request_that_fills_the_cache_to_the_last_slot_is_served():
    """S1, the other side: the last token drawn needs no slot."""
    engine = make_engine(FCFS(), num_blocks=2)
    (request,) = engine.add_request("r", range(6), greedy(3))
    drain(engine)
    assert request.output_token_ids == expected(request)[0] and engine.records.steps[-1].slots_stored == 0
    assert max(s.slots_stored for s in engine.records.steps) <= 8


@pytest.mark.parametrize("policy", ALL)
def test_a_whole_prompt_hit_still_computes_a_token_and_keeps_the_hash_chain(policy):
    """S2: the same 2-block prompt again and again, then one that goes on from it."""
    engine = make_engine(policy())
    for name in ("first", "second"):
        (request,) = engine.add_request(name, range(8), greedy(1))
        drain(engine)
    assert request.num_cached_tokens == 4 and starts(engine)[-1] == {"second": 4}
    (longer,) = engine.add_request("longer", range(12), greedy(1))
    drain(engine)
    assert longer.num_cached_tokens == 8, "the chain over both blocks of the prompt is whole"


def test_blocks_not_yet_computed_are_not_found():
    """S3: two equal prompts in one step share nothing, each block has one owner; the next step's request does hit."""
    engine = make_engine(FCFS())
    a, b = (engine.add_request(name, range(9), greedy(4))[0] for name in "ab")
    engine.step()
    assert starts(engine) == [{"a": 0, "b": 0}]
    assert not set(a.block_ids) & set(b.block_ids)
    (c,) = engine.add_request("c", range(9), greedy(4))
    engine.step()
    assert starts(engine)[1]["c"] == 8 and c.block_ids[:2] == a.block_ids[:2]
    drain(engine)
    assert_empty(engine)


def test_a_prompt_in_chunks_is_found_only_as_far_as_it_is_computed():
    """S3, chunked: half a prompt in the cache is half a hit."""
    engine = make_engine(Script(SchedulePlan({"a": 6}), SchedulePlan({"b": 1})))
    engine.add_request("a", range(12), greedy())
    engine.step()
    (b,) = engine.add_request("b", range(12), greedy())
    engine.step()
    assert b.num_cached_tokens == 4


def test_a_block_taken_over_is_a_miss_for_its_former_prefix():
    """S4: X's block goes to Y; X comes again and must not see Y's data (the shadow store would tell)."""
    engine = make_engine(FCFS(), num_blocks=2)
    for name, prompt in (("x", range(6)), ("y", range(20, 26)), ("x again", range(6))):
        (request,) = engine.add_request(name, prompt, greedy(2))
        drain(engine)
        assert request.output_token_ids == expected(request)[0]
    assert request.num_cached_tokens == 0 and engine.kv_cache.num_evictions == 2


def test_the_tail_of_a_prefix_is_given_up_before_its_head():
    """S4, order: of a cached chain the head stays useful longest."""
    engine = make_engine(FCFS(), num_blocks=4)
    engine.add_request("x", range(12), greedy(1))
    drain(engine)
    engine.add_request("y", range(20, 28), greedy(1))
    drain(engine)
    (again,) = engine.add_request("x again", range(12), greedy(1))
    drain(engine)
    assert again.num_cached_tokens == 8


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_new_block_is_taken_exactly_when_the_last_one_is_full(size):
    """S5: prompts of bs - 1, bs and bs + 1 tokens, token by token."""
    for length in {max(1, size - 1), size, size + 1}:
        engine = make_engine(FCFS(), block_size=size, num_blocks=40)
        (request,) = engine.add_request("r", range(length), greedy(2 * size + 2))
        while engine.has_unfinished:
            engine.step()
            if not request.is_finished:
                assert request.num_blocks == -(-request.num_computed_tokens // size)


def test_no_one_is_preempted_in_the_middle_of_a_block():
    """S5: a full pool is no reason to preempt while every running request has a free slot in its last block."""
    engine = make_engine(FCFS(watermark=0.0), num_blocks=2, enable_prefix_caching=False)
    for name in "ab":
        engine.add_request(name, [1], greedy(4))
    drain(engine)
    assert not any(s.preemptions for s in engine.records.steps) and len(engine.records.steps) == 4


def test_hits_are_looked_up_anew_at_every_try():
    """S6: admission fails; meanwhile the prefix comes into the cache, and goes again; each view says what is true."""
    engine = make_engine(Script(SchedulePlan({"a": 8}), SchedulePlan()), num_blocks=4)
    engine.add_request("a", range(8), greedy(5))
    (b,) = engine.add_request("b", range(9), greedy())
    assert engine.view().cached_tokens(b) == 0
    engine.step()
    assert engine.view().cached_tokens(b) == 8 and engine.view().uncomputed_tokens(b) == 1
    engine.abort("a")
    assert engine.view().cached_tokens(b) == 8, "kept for the prefix cache"
    engine.add_request("c", range(30, 43), greedy(4))
    engine.scheduler.plans = [SchedulePlan({"c": 13})]
    engine.step()
    assert engine.view().cached_tokens(b) == 0
    engine._policy.scheduler = FCFS()
    drain(engine)
    assert b.output_token_ids == expected(b)[0]


@pytest.mark.parametrize("policy", ALL)
def test_a_chunked_prefill_that_finds_the_pool_full_waits_or_gives_way(policy):
    """S14: prompts longer than the budget, growing together in a pool too small for all; never out of memory."""
    engine = make_engine(policy(admission="chunk", watermark=0.0), num_blocks=6, max_num_batched_tokens=6)
    requests = [engine.add_request(str(i), range(100 * i, 100 * i + 14), greedy(8))[0] for i in range(3)]
    drain(engine)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]
    assert_empty(engine)


@pytest.mark.parametrize("policy", ALL)
def test_four_cold_prompts_run_in_one_step_when_the_budget_allows_it(policy):
    """S15: nothing latches after the first admission."""
    engine = make_engine(policy(), max_num_seqs=4, num_blocks=32)
    for i in range(4):
        engine.add_request(str(i), range(100 * i, 100 * i + 8), greedy())
    engine.step()
    assert starts(engine) == [dict.fromkeys("0123", 0)]
    engine.step()
    assert starts(engine)[1] == dict.fromkeys("0123", 8)


def test_continuations_share_the_prompt_and_copy_on_write():
    """S22: n = 4 is one prefill, one prompt in the cache, three copied tails and four different outputs."""
    engine = make_engine(FCFS(), num_blocks=32)
    sampling = greedy(6, n=4, seed=7)
    group = engine.add_request("r", range(10), sampling)
    assert [r.id for r in group] == ["r/0", "r/1", "r/2", "r/3"]
    assert [r.seed for r in group] == [7, 8, 9, 10]
    engine.step()
    assert engine.view().num_waiting == 3
    engine.step()
    assert [r.num_computed_tokens for r in group] == [11, 10, 10, 10]
    assert all(r.block_ids[:2] == group[0].block_ids[:2] for r in group)
    assert len({r.block_ids[2] for r in group}) == 4
    assert engine.records.steps[1].blocks_copied == 3 and engine.kv_cache.num_used_blocks == 6
    assert engine.kv_cache.slots_stored == 8 + 3 + 3 * 2
    assert sum(map(sum, (s.num_tokens for s in engine.records.steps[:2]))) == 10 + 4, "the prompt was computed once"
    drain(engine)
    assert len({tuple(r.output_token_ids) for r in group}) == 4
    assert [r.output_token_ids for r in group] == [expected(r)[0] for r in group]
    assert_empty(engine)


def test_a_continuation_let_in_late_does_not_spoil_what_others_find():
    """S22: its sibling filled the prompt's last block with an output token, published it, and was preempted."""
    first, last = SchedulePlan({"r/0": 6}), SchedulePlan({"r/0": 1})
    swap_over = SchedulePlan({"r/1": 2}, [Preemption("r/0")])
    engine = make_engine(Script(first, last, last, swap_over, SchedulePlan({"r/1": 1})))
    a, b = engine.add_request("r", range(6), greedy(6, n=2))
    for _ in range(5):
        engine.step()
    assert a.output_token_ids[:1] != b.output_token_ids[:1]
    engine._policy.scheduler = FCFS()
    drain(engine)
    assert [r.output_token_ids for r in (a, b)] == [expected(r)[0] for r in (a, b)]


def test_what_a_preemption_leaves_is_what_a_policy_sees():
    """Recompute: nothing computed, no blocks. Swap: all computed, no device blocks; what was freed is free."""
    for mode, computed in (("recompute", 0), ("swap", 6)):
        preempts = SchedulePlan({}, [Preemption("r", mode)])
        engine = make_engine(Script(SchedulePlan({"r": 6}), preempts), num_blocks=4, num_host_blocks=3)
        (request,) = engine.add_request("r", range(6), greedy())
        engine.step()
        engine.step()
        assert (request.num_computed_tokens, request.num_uncomputed_tokens) == (computed, 7 - computed)
        assert request.num_blocks == 0 and not request.is_running and engine.view().num_free_blocks == 4
        assert engine.view().num_free_host_blocks == (1 if mode == "swap" else 3)
        assert engine.view().waiting == (request,) and request.num_preemptions == 1


def test_blocks_brought_back_from_the_host_are_found_again():
    """After swap-in the request's prefix serves others once more."""
    out, decode = SchedulePlan({}, [Preemption("r", "swap")]), SchedulePlan({"r": 1})
    engine = make_engine(Script(SchedulePlan({"r": 8}), out, *[decode] * 4), num_host_blocks=4)
    (request,) = engine.add_request("r", range(8), greedy(9))
    engine.step()
    engine.step()
    engine.kv_cache.reset_prefix_cache()
    for _ in range(4):
        engine.step()
    (other,) = engine.add_request("other", [*request.token_ids[:12], 1], greedy(1))
    assert engine.view().cached_tokens(other) == 12


def test_continuations_without_a_prefix_cache_share_all_the_same():
    """S22 with enable_prefix_caching off: sharing among continuations is no prefix hit."""
    engine = make_engine(FCFS(), enable_prefix_caching=False)
    group = engine.add_request("r", range(8), greedy(3, n=3))
    drain(engine)
    assert [r.num_cached_tokens for r in group] == [0, 7, 7]
    assert [r.output_token_ids for r in group] == [expected(r)[0] for r in group]


def test_prompt_log_probabilities_skip_the_cache_read():
    """S19: a request that asks for them computes its whole prompt, however much of it is cached."""
    engine = make_engine(FCFS())
    for name in ("first", "second"):
        (request,) = engine.add_request(name, range(8), greedy(1, prompt_logprobs=0))
        drain(engine)
    assert request.num_cached_tokens == 0 and starts(engine)[-1] == {"second": 0}


def test_a_victim_whose_blocks_are_all_shared_is_spared():
    """S10: preempting it would free nothing; another gives way and it goes on."""

    class LastFirst(FCFS):
        def victim(self, candidates, needy, view):
            return next((r for r in candidates if r.id == "shared"), candidates[-1])

        def order(self, view):
            return [r for r in view.running if r.id == "needy"] or [*view.running, *view.waiting]

    engine = make_engine(Script(), num_blocks=5)
    engine.scheduler.plans = [
        SchedulePlan({"shared": 4}), SchedulePlan({"holder": 2}), SchedulePlan({"needy": 8, "other": 2}),
    ]  # fmt: skip
    shared, holder, needy, other = (
        engine.add_request(name, prompt, greedy(8))[0]
        for name, prompt in (
            ("shared", range(4)), ("holder", [*range(4), 9, 9]), ("needy", range(40, 48)), ("other", [50, 51]),
        )
    )  # fmt: skip
    for _ in range(3):
        engine.step()
    assert engine.view().num_free_blocks == 0 and engine.view().blocks_freed_by(shared) == 0
    engine._policy.scheduler = LastFirst()
    engine.step()
    (gone,) = engine.records.steps[-1].preemptions
    assert gone.request_id == "other" and gone.blocks_freed == 1
    assert "needy" in engine.records.steps[-1].request_ids
    drain(engine)
    assert [r.output_token_ids for r in (shared, holder, needy, other)] == [
        expected(r)[0] for r in (shared, holder, needy, other)
    ]


def test_a_livelock_ends_in_an_error_that_names_the_request():
    """S10: a policy that takes turns at preempting never gets anywhere, and is told so."""

    class TakesTurns(Scheduler):
        def schedule(self, view: EngineView) -> SchedulePlan:
            (other,) = view.waiting if view.num_running else (None,)
            if other is None:
                return SchedulePlan({view.waiting[0].id: 1})
            return SchedulePlan({other.id: 1}, [Preemption(view.running[0].id)])

    engine = make_engine(TakesTurns(), stall_limit=20, enable_prefix_caching=False)
    for name in ("early", "late"):
        engine.add_request(name, range(8), greedy())
    with pytest.raises(StalledError, match=r"no request advanced in 20 steps .*'early'.*TakesTurns"):
        drain(engine)


def test_recomputing_a_long_prompt_in_small_chunks_is_no_livelock():
    """Many more steps than stall_limit go by before it is where it was; each of them is needed."""

    class OneByOne(Scheduler):
        def schedule(self, view: EngineView) -> SchedulePlan:
            if view.step == 1:
                return SchedulePlan({}, [Preemption("r")])
            (request,) = (*view.running, *view.waiting)
            return SchedulePlan({"r": request.num_uncomputed_tokens if view.step == 0 else 1})

    engine = make_engine(OneByOne(), num_blocks=16, stall_limit=5, enable_prefix_caching=False)
    (request,) = engine.add_request("r", range(40), greedy(2))
    drain(engine)
    assert request.num_recomputed_tokens == 40
    engine._policy.scheduler = Script()
    engine.add_request("never", [1], greedy())
    with pytest.raises(StalledError, match="'never'"):
        drain(engine)
