"""The law of the what-if account: what the ledger says of a plan is what commit does, in any state, in any order."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from research_engine.engine.contract import EngineView, SchedulePlan
from schedulers.fcfs import FCFS

from .random_policies import RandomPolicy
from .random_runs import RandomRun
from .shadow import greedy, make_engine


def account(view: EngineView, plan: SchedulePlan, order: list[tuple[str, object]]):
    """The ledger after the plan's parts are entered in the given order; None once a grant is refused."""
    by_id = {r.id: r for r in (*view.running, *view.waiting)}
    ledger = view.ledger()
    for kind, entry in order:
        if kind == "preempt":
            ledger.preempt(by_id[entry.request_id], entry.mode)
            continue
        request, num_tokens = by_id[entry], plan.tokens[entry]
        cost, before = ledger.cost(request, num_tokens), ledger.free_blocks
        granted = ledger.grant(request, num_tokens)
        assert granted == (cost <= before), "cost and grant disagree"
        assert ledger.free_blocks == (before - cost if granted else before)
        if not granted:
            return None
    return ledger


@pytest.mark.parametrize(
    ("reservation", "runs"), [("paged", 400), ("reserve_max", 300), ("reserve_pow2", 300), ("reserve_oracle", 300)]
)
def test_the_account_of_a_plan_equals_what_commit_leaves(reservation, runs):
    """Free device and host blocks after commit; host blocks of a swap-in are free only when it is done."""
    seen: Counter[str] = Counter()
    for seed in range(runs):
        run = RandomRun(seed, lambda rng: RandomPolicy(rng, 0.15, 0.1, 0.5), aborts=0.03, reservation=reservation)
        engine, rng, commit = run.engine, random.Random(seed), run.engine.commit

        def checked(plan, view, engine=engine, rng=rng, commit=commit):
            entries = [*(("preempt", p) for p in plan.preempt), *(("grant", name) for name in plan.tokens)]
            ledgers = [account(view, plan, entries)]
            assert ledgers[0] is not None, "a plan that keeps the rules was refused"
            rng.shuffle(entries)
            ledgers.append(account(view, plan, entries))
            batch = commit(plan, view)
            for ledger in filter(None, ledgers):
                assert ledger.free_blocks == engine.kv_cache.num_free_blocks
                assert ledger.free_host_blocks == engine.kv_cache.num_free_host_blocks - len(batch.swap_in)
            seen["in any order"] += ledgers[1] is not None and bool(plan.preempt)
            seen["copies"] += bool(batch.copies)
            seen["copies and preemptions"] += bool(batch.copies and batch.preempted)
            seen["swaps in"] += bool(batch.swap_in)
            seen["hits and preemptions"] += bool(batch.preempted) and any(r.num_computed_tokens for r in batch.admitted)
            return batch

        engine.commit = checked  # type: ignore[method-assign]
        run.finish()
    assert min(seen[kind] for kind in ("in any order", "copies", "swaps in", "hits and preemptions")) > 50, seen
    assert seen["copies and preemptions"] > 5, seen


def test_a_copy_of_the_account_goes_its_own_way():
    engine = make_engine(FCFS())
    (a,) = engine.add_request("a", range(8), greedy())
    (b,) = engine.add_request("b", range(50, 58), greedy())
    first = engine.view().ledger()
    assert first.grant(a, 8)
    second = first.copy()
    assert second.grant(b, 8)
    assert (first.free_blocks, second.free_blocks) == (14, 12)
    assert first.grant(b, 8) and first.free_blocks == 12


def test_asking_changes_nothing():
    """Ledger and view may be asked anything; books and next plan are as before."""
    engine = make_engine(FCFS())
    for name in "abc":
        engine.add_request(name, range(9), greedy(6))
    engine.step()
    state = (list(engine.kv_cache._refs), list(engine.kv_cache._free), list(engine.kv_cache._evictable))
    view = engine.view()
    ledger = view.ledger()
    for request in view.running:
        ledger.preempt(request, "recompute")
    for request in view.waiting:
        ledger.grant(request, 1)
    assert ledger.free_blocks == 16
    assert state == (list(engine.kv_cache._refs), list(engine.kv_cache._free), list(engine.kv_cache._evictable))
