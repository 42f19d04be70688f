"""A policy that breaks a rule gets a PlanError that names it; the books stay as they were and life goes on."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest

from research_engine.engine.contract import EngineView, Preemption, Request, SchedulePlan, Scheduler
from research_engine.engine.engine import Engine
from research_engine.engine.errors import PlanError, PolicyError
from schedulers.fcfs import FCFS

from .random_policies import BREAKERS, RandomPolicy
from .random_runs import RandomRun
from .shadow import assert_empty, drain, expected, greedy, make_engine

REQUEST_FIELDS = [
    name for name in Request.__slots__ if name not in ("_digests", "_text", "_token_ids", "_sampling", "_sibling")
]  # _digests is a memo of what _tokens imply


def snapshot(engine: Engine) -> dict[str, Any]:
    """Everything that a plan could change, copied deep."""
    books = {name: value for name, value in vars(engine.kv_cache).items() if name != "_config"}
    cache = {name: list(value.items()) if isinstance(value, dict) else value for name, value in books.items()}
    places = (
        engine.queues.live,
        engine.queues.running,
        engine.queues.returning,
        engine.queues.new,
        engine.queues._groups,
        engine.queues._held_back,
    )
    requests = [r for group in engine.queues._groups.values() for r in group]
    return copy.deepcopy({
        "cache": cache,
        "places": [list(place) for place in places],
        "names": engine.queues._names,
        "steps": (engine.num_steps, len(engine.records.steps), len(engine.records.requests)),
        "requests": {r.id: [getattr(r, name) for name in REQUEST_FIELDS] for r in requests},
        "store": engine.executor.device,  # type: ignore[attr-defined]
    })  # fmt: skip


def test_a_broken_plan_changes_nothing_and_the_run_goes_on():
    """Random valid plans, each broken in a random way before the step is taken for good; outputs stay right."""
    broken: Counter[str] = Counter()
    for seed in range(100):
        run = RandomRun(seed, lambda rng: RandomPolicy(rng, 0.05, 0.1, 0.5), aborts=0.02)
        engine, rng, whole_step = run.engine, random.Random(seed), run.step

        def step_after_fault(engine=engine, rng=rng, whole_step=whole_step) -> None:
            breaker, view = rng.choice(BREAKERS), engine.view()
            plan = breaker(engine.plan(view), view, rng)
            if plan is not None:
                before = snapshot(engine)
                with pytest.raises(PlanError):
                    engine.commit(plan, view)
                assert snapshot(engine) == before, f"{breaker.__name__} left a trace"
                broken[breaker.__name__] += 1
            whole_step()

        run.step = step_after_fault  # type: ignore[method-assign]
        run.finish()
    assert set(broken) == {breaker.__name__ for breaker in BREAKERS} and min(broken.values()) > 8, broken


class Scripted(Scheduler):
    """Returns what the test put there."""

    def __init__(self) -> None:
        self.plan: Any = SchedulePlan()

    def schedule(self, view: EngineView) -> SchedulePlan:
        if isinstance(self.plan, BaseException):
            raise self.plan
        return self.plan


class Mute(Exception):
    """Cannot say what it is about."""

    def __str__(self) -> str:
        raise RuntimeError("no str")


class MuteTwice(Mute):
    def __str__(self) -> str:
        raise MuteTwice


class Hidden:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


@pytest.fixture
def engine() -> Engine:
    """a and b run with 8 tokens in 2 of 6 blocks each, c and d wait, 1 host block, 2 seats; 20 tokens a step."""
    sizes = {"num_blocks": 6, "num_host_blocks": 1, "max_num_seqs": 2, "max_num_batched_tokens": 20}
    engine = make_engine(Scripted(), enable_prefix_caching=False, **sizes)
    for name in "abcd":
        engine.add_request(name, range(8 if name in "ab" else 12), greedy(8))
    engine.scheduler.plan = SchedulePlan({"a": 8, "b": 8})
    engine.step()
    return engine


a, b = Preemption("a"), Preemption("b")
BROKEN = {
    "unknown": (SchedulePlan({"z": 1}), "request 'z': is scheduled, but no such request is live"),
    "zero tokens": (SchedulePlan({"a": 0}), "request 'a': gets 0 tokens; it must be an integer >= 1"),
    "fractional tokens": (SchedulePlan({"a": 1.0}), "request 'a': gets 1.0 tokens; it must be an integer >= 1"),
    "beyond the known": (SchedulePlan({"a": 2}), "request 'a': gets 2 tokens, but only 1 are known and not computed"),
    "too few blocks": (
        SchedulePlan({"a": 1, "b": 1, "c": 4}),
        "request 'c': needs 1 more blocks for 4 tokens, 0 are left of 6",
    ),
    "budget": (SchedulePlan({"c": 12, "d": 9}, [a, b]), "it holds 21 tokens, max_num_batched_tokens is 20"),
    "seats": (SchedulePlan({"c": 1}), "3 requests would hold blocks, max_num_seqs is 2"),
    "victim unknown": (SchedulePlan({}, [Preemption("z")]), "request 'z': is preempted, but no such request is live"),
    "victim waits": (SchedulePlan({}, [Preemption("c")]), "request 'c': is preempted, but it is waiting, not running"),
    "victim twice": (SchedulePlan({}, [a, a]), "request 'a': is preempted twice in one plan"),
    "victim scheduled": (SchedulePlan({"a": 1}, [a]), "request 'a': is preempted and scheduled in one plan"),
    "mode": (
        SchedulePlan({}, [Preemption("a", "drop")]),
        "request 'a': preemption mode 'drop' is neither 'recompute' nor 'swap'",
    ),
    "host": (
        SchedulePlan({}, [Preemption("a", "swap")]),
        "request 'a': swapping it needs 2 host blocks, 1 are free of num_host_blocks = 1",
    ),
    "no preemption": (SchedulePlan({}, ["a"]), "preempt holds 'a'; it must hold Preemption(request_id, mode, reason)"),
    "a reason that cannot be written": (
        SchedulePlan({}, [Preemption("a", "recompute", 5)]),
        "it must hold Preemption(request_id, mode, reason)",
    ),
    "no preemption, and nothing to show": (
        SchedulePlan({}, [Hidden()]),
        "preempt holds a Hidden (it could not be shown: RuntimeError: no repr); it must hold Preemption(",
    ),
    "tokens a list": (SchedulePlan(["a"]), "tokens is ['a']; it must map request ids to numbers of tokens"),
    "preempt a generator": (SchedulePlan({}, (p for p in ())), "it must be a list or tuple of Preemption"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_has_its_message(engine, case):
    """The error names the step, the request and the numbers; afterwards a sound plan is carried out."""
    plan, message = BROKEN[case]
    engine.scheduler.plan = plan
    before = snapshot(engine)
    with pytest.raises(PlanError) as caught:
        engine.step()
    assert message in str(caught.value) and str(caught.value).startswith("step 1: ")
    assert snapshot(engine) == before
    engine._policy.scheduler = FCFS()
    drain(engine)
    assert_empty(engine)
    assert all(r.output_tokens == 8 for r in engine.records.requests)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (KeyError("x"), "step 1: Scripted.schedule raised KeyError: 'x'"),
        (SystemExit(0), "step 1: Scripted.schedule raised SystemExit: 0"),
        (None, "step 1: Scripted.schedule returned None; it must return a SchedulePlan"),
        ({"a": 1}, "returned {'a': 1}; it must return a SchedulePlan"),
        (Mute(), "step 1: Scripted.schedule raised Mute (its message could not be made: RuntimeError: no str)"),
        (MuteTwice(), "step 1: Scripted.schedule raised MuteTwice (its message could not be made: MuteTwice)"),
        (Hidden(), "returned a Hidden (it could not be shown: RuntimeError: no repr); it must return a SchedulePlan"),
    ],
)
def test_a_policy_that_raises_or_returns_no_plan_is_named(engine, plan, message):
    engine.scheduler.plan = plan
    before = snapshot(engine)
    with pytest.raises(PolicyError) as caught:
        engine.step()
    assert message in str(caught.value)
    assert caught.value.__cause__ is (plan if isinstance(plan, BaseException) else None)
    assert snapshot(engine) == before


def test_a_plan_is_read_once(engine):
    """A mapping that answers otherwise after it was checked changes nothing that was not checked."""

    class Fickle(dict[str, int]):
        asked = 0

        def items(self):  # type: ignore[no-untyped-def,override]
            self.asked += 1
            return {"a": 1}.items() if self.asked == 1 else {"a": 1000}.items()

    engine.scheduler.plan = SchedulePlan(Fickle(a=1))
    engine.step()
    assert list(engine.records.steps[-1].num_tokens) == [1]
    engine._policy.scheduler = FCFS()
    drain(engine)
    assert_empty(engine)


class Listener(FCFS):
    """Raises in one of its events, once."""

    raises_in = ""

    def _event(self, name: str) -> None:
        if self.raises_in == name:
            self.raises_in = ""
            raise RuntimeError("boom")

    def on_arrival(self, request: Request) -> None:
        self._event("on_arrival")

    def on_step(self, record: Any) -> None:
        self._event("on_step")

    def on_finish(self, request: Request) -> None:
        self._event("on_finish")


@pytest.mark.parametrize("event", ["on_arrival", "on_step", "on_finish"])
def test_a_policy_that_raises_in_an_event_is_named_and_nothing_is_lost(event):
    """The step, arrival or finish is completed first: no token, record or block goes missing."""
    policy = Listener()
    engine = make_engine(policy)
    policy.raises_in = event
    outputs, caught = [], []
    for name in "abc":
        try:
            engine.add_request(name, [1, 2, 3], greedy(3, n=2))
        except PolicyError as error:
            caught.append(str(error))
    for _ in range(30):
        try:
            outputs += engine.step()
        except PolicyError as error:
            caught.append(str(error))
    assert len(caught) == 1 and f"Listener.{event} raised RuntimeError: boom" in caught[0]
    assert_empty(engine)
    records = engine.records.requests
    assert sorted(r.request_id for r in records) == ["a/0", "a/1", "b/0", "b/1", "c/0", "c/1"]
    assert {(r.output_tokens, r.finish_reason) for r in records} == {(3, "length")}
    assert sum(map(sum, (s.drew for s in engine.records.steps))) == 18


def test_outputs_stay_right_after_a_fault(engine):
    """Tokens computed before and after a refused plan add up to the undisturbed output."""
    requests = list(engine.queues.live.values())
    engine.scheduler.plan = SchedulePlan({"a": 99})
    with pytest.raises(PlanError):
        engine.step()
    engine._policy.scheduler = FCFS()
    drain(engine)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]
