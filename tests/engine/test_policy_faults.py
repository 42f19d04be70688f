"""A policy can neither corrupt the engine nor stop it where it is told to go on; and it may wait for a time."""

from __future__ import annotations

import pickle
import re
import time
from types import MappingProxyType
from typing import Any

import pytest

from research_engine.engine.clock import MonotonicClock, Stopwatch
from research_engine.engine.config import EngineConfig
from research_engine.engine.contract import EngineView, Preemption, SchedulePlan, Scheduler
from research_engine.engine.decision_log import DecisionLog, ReplayScheduler
from research_engine.engine.driver import Arrival, replay
from research_engine.engine.errors import PlanError, PolicyError, StalledError
from research_engine.engine.sampling_params import SamplingParams
from schedulers.base import PolicyScheduler
from schedulers.chunked_prefill import ChunkedPrefill

from .random_policies import BREAKERS, RandomPolicy
from .random_runs import RandomRun
from .shadow import assert_empty, drain, expected, greedy, make_engine

# What a policy sees cannot be changed.


class Vandal(ChunkedPrefill):
    """Tries to change all that it is shown, and then schedules as if nothing had happened."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.refused = 0

    def _try(self, change: Any) -> None:
        try:
            change()
        except (AttributeError, TypeError):
            self.refused += 1

    def schedule(self, view: EngineView) -> SchedulePlan:
        for request in (*view.running, *view.waiting):
            for name in ("id", "priority", "arrival_time", "sampling", "sibling", "token_ids", "num_tokens", "status"):
                self._try(lambda request=request, name=name: setattr(request, name, None))
            for change in ("append(7)", "clear()", "__setitem__(0, 7)", "sort()", "pop()"):
                for name in ("token_ids", "block_ids", "prompt_logprobs"):
                    self._try(lambda request=request, what=f"request.{name}.{change}": eval(what, {"request": request}))
            self._try(lambda request=request: request.sampling.logit_bias.update({1: 1.0}))
            request.token_ids[:].append(7)  # a slice is the policy's own
            request.prompt_token_ids.clear()
        self._try(lambda: setattr(view.config, "num_blocks", 1))
        self._try(lambda: setattr(view, "running", ()))
        return super().schedule(view)

    def on_step(self, record: Any) -> None:
        record.request_ids.clear()
        record.num_tokens.append(99)
        record.num_running = -1


def test_a_policy_cannot_change_what_it_is_shown():
    policy = Vandal(preemption="swap")
    engine = make_engine(policy, num_blocks=6, num_host_blocks=6)
    requests = [engine.add_request(name, range(7), greedy(9))[0] for name in "abc"]
    drain(engine)
    assert_empty(engine)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]
    assert policy.refused > 24 * len(engine.records.steps)
    for step in engine.records.steps:
        assert len(step.request_ids) == len(step.num_tokens) > 0 <= step.num_running


def test_what_is_shown_is_a_sequence_like_any_other():
    engine = make_engine(ChunkedPrefill())
    (request,) = engine.add_request("a", range(5), greedy(3))
    drain(engine)
    tokens = request.token_ids
    assert tokens == list(tokens) and list(tokens) == tokens and tokens[:5] == [0, 1, 2, 3, 4]
    assert (len(tokens), tokens[-1] in tokens, tokens.index(3), repr(tokens)) == (8, True, 3, repr(list(tokens)))
    bias = SamplingParams(logit_bias={3: 1.0})
    assert pickle.loads(pickle.dumps(bias)) == bias and dict(bias.logit_bias) == {3: 1.0}


# Faults.


class Faulty(ChunkedPrefill):
    """Does something wrong in the steps that `when` names, and is right in the others."""

    what: Any = None
    takes = 0.0  # seconds, for a wrong step
    watch: Any = None
    when: range = range(3, 6)

    def schedule(self, view: EngineView) -> SchedulePlan:
        plan = super().schedule(view)
        if view.step not in self.when or not plan.tokens:
            return plan
        self.watch.shows = self.takes
        return self.what(plan, view)


class FakeWatch:
    """A stopwatch that shows what the test says, whatever else the machine is doing."""

    def __init__(self) -> None:
        self.shows = 0.0

    def start(self) -> None:
        self.shows = 0.0

    def seconds(self) -> float:
        return self.shows


def dozes(plan: SchedulePlan, view: EngineView) -> SchedulePlan:
    return plan


def raises(plan: SchedulePlan, view: EngineView) -> SchedulePlan:
    raise KeyError("x")


def first(plan: SchedulePlan) -> str:
    return next(iter(plan.tokens))


FAULTS = {
    "unknown": (lambda plan, view: SchedulePlan({"z": 1}), PlanError, "Faulty: request 'z': is scheduled, but no such"),
    "finished": (lambda plan, view: SchedulePlan({"short": 1}), PlanError, "Faulty: request 'short': is scheduled"),
    "over the budget": (
        lambda plan, view: SchedulePlan({**plan.tokens, "late": 40}),
        PlanError, "Faulty: it holds 42 tokens, max_num_batched_tokens is 40",
    ),
    "more blocks than there are": (
        lambda plan, view: SchedulePlan({"late": 30, "huge": 30}),
        PlanError, "Faulty: request 'huge': needs 8 more blocks",
    ),
    "victim scheduled": (
        lambda plan, view: SchedulePlan(plan.tokens, [Preemption(first(plan))]),
        PlanError, "Faulty: request 'a': is preempted and scheduled in one plan",
    ),
    "victim twice": (
        lambda plan, view: SchedulePlan({}, [Preemption(first(plan))] * 2),
        PlanError, "Faulty: request 'a': is preempted twice in one plan",
    ),
    "no time": (
        lambda plan, view: SchedulePlan({}, wake_at=float("inf")),
        PlanError, "wake_at is inf; it must be a finite number",
    ),
    "a time beyond every clock": (
        lambda plan, view: SchedulePlan({}, wake_at=10**400),
        PlanError, "wake_at is 10+; it must be a finite number",
    ),
    "no time, in a mapping of its own": (
        lambda plan, view: SchedulePlan(MappingProxyType({}), wake_at=float("nan")),
        PlanError, "wake_at is nan; it must be a finite number",
    ),
    "words that are none, in a mapping of its own": (
        lambda plan, view: SchedulePlan(MappingProxyType(dict(plan.tokens)), reasons=["no room"]),
        PlanError, "reasons is .'no room'.; it must map request ids to words",
    ),
    "a reason that is no text": (
        lambda plan, view: SchedulePlan(plan.tokens, reasons={"a": 3}),
        PlanError, "reasons.'a'. is 3; it must be a text",
    ),
    "facts that are none": (
        lambda plan, view: SchedulePlan(plan.tokens, seen={"a": 5}),
        PlanError, "seen.'a'. is 5; it must map names to numbers and texts",
    ),
    "facts of another kind": (
        lambda plan, view: SchedulePlan(plan.tokens, seen={"a": {"rank": [1]}}),
        PlanError, "seen.'a'. is {'rank': .1.}; it must map names to numbers and texts",
    ),
    "sleeps": (dozes, PolicyError, "Faulty.schedule took 2.000 s, schedule_limit is 1 s; .* wake_at"),
    "raises": (raises, PolicyError, "Faulty.schedule raised KeyError: 'x'"),
    "no plan": (lambda plan, view: [first(plan)], PolicyError, "Faulty.schedule returned .*must return a SchedulePlan"),
}  # fmt: skip


def faulty_engine(what: Any, on_fault: str, decisions: DecisionLog | None = None):
    """a and b decode when the fault comes, short has ended, late, later and huge wait for a seat."""
    policy = Faulty()
    policy.what, policy.takes = what, 2.0 * (what is dozes)
    engine = make_engine(
        policy, decisions=decisions, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=40, on_fault=on_fault,
        enable_prefix_caching=False,
    )  # fmt: skip
    policy.watch = engine._policy._stopwatch = FakeWatch()
    requests = [
        engine.add_request("short", range(3), greedy(1))[0],
        engine.add_request("a", range(5), greedy(12))[0],
        engine.add_request("b", range(6), greedy(12))[0],
    ]
    for _ in range(3):
        engine.step()
    requests += [engine.add_request(name, range(40), greedy(3))[0] for name in ("late", "later", "huge")]
    return engine, requests


@pytest.mark.parametrize("kind", FAULTS)
def test_the_engine_stops_clean_at_a_fault(kind):
    """The error has policy, step, request and rule; nothing was done; without the fault the run goes on."""
    what, error, message = FAULTS[kind]
    engine, requests = faulty_engine(what, "stop")
    with pytest.raises(error, match=message) as caught:
        engine.step()
    fault = caught.value
    assert (fault.policy, fault.step, engine.faults.total) == ("Faulty", 3, 0)
    assert fault.rule and str(fault).startswith("step 3: ")
    assert (fault.request_id is not None) == ("request '" in str(fault))
    engine.scheduler.when = range(0)
    drain(engine)
    assert_empty(engine)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]


@pytest.mark.parametrize("kind", FAULTS)
def test_the_engine_goes_on_past_a_fault_where_it_is_told_to(kind):
    """The step is planned by arrival, the fault kept and written down, and all outputs are right."""
    what, error, _ = FAULTS[kind]
    log = DecisionLog()
    engine, requests = faulty_engine(what, "go_on", log)
    drain(engine)
    assert_empty(engine)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]
    faults = engine.faults
    assert faults.total == len(faults.latest) and {fault.step for fault in faults.latest} == {3, 4, 5}
    assert all(isinstance(fault, error) for fault in faults.latest)
    told = [decision for decision in log.decisions if "planned by arrival, for the policy failed" in decision.rest]
    assert [decision.step for decision in told] == [3, 4, 5] and all(decision.tokens for decision in told)


def test_a_sleep_is_counted_and_a_core_that_was_not_given_is_not():
    """Real seconds for a thread that sleeps; else those of the thread alone."""
    watch = Stopwatch()
    watch.start()
    time.sleep(0.05)
    assert watch.seconds() >= 0.05

    class Sleeps(ChunkedPrefill):
        def schedule(self, view: EngineView) -> SchedulePlan:
            time.sleep(0.05)
            return super().schedule(view)

    engine = make_engine(Sleeps(), schedule_limit=0.01)
    engine.add_request("r", [1], greedy())
    with pytest.raises(PolicyError, match=r"step 0: Sleeps.schedule took 0\.\d+ s, schedule_limit is 0.01 s"):
        engine.step()


def test_random_faults_change_no_output():
    """Random plans, each broken in a random way with probability 1/2, in runs that go on."""

    class Broken(RandomPolicy):
        def schedule(self, view: EngineView) -> SchedulePlan:
            plan = super().schedule(view)
            broken = self.rng.choice(BREAKERS)(plan, view, self.rng) if self.rng.random() < 0.5 else None
            return plan if broken is None else broken

    total = 0
    for seed in range(60):
        run = RandomRun(seed, lambda rng: Broken(rng, 0.05, 0.1, 0.5), on_fault="go_on")
        run.finish()
        total += run.engine.faults.total
    assert total > 300


class AlwaysRaises(Scheduler):
    """Of no use at all, in its events neither."""

    def schedule(self, view: EngineView) -> SchedulePlan:
        raise ZeroDivisionError("always")

    def on_arrival(self, request: Any) -> None:
        raise ZeroDivisionError("at an arrival")


def test_without_its_policy_an_engine_serves_everybody_in_a_cache_that_holds_one():
    for seed in range(60):
        run = RandomRun(seed, lambda rng: AlwaysRaises(), on_fault="go_on")
        run.finish()
        hooks = {fault.rule.split()[0] for fault in run.engine.faults.latest}
        assert hooks <= {"AlwaysRaises.schedule", "AlwaysRaises.on_arrival"} and hooks
    engine = make_engine(AlwaysRaises(), num_blocks=5, on_fault="go_on")
    requests = [engine.add_request(name, range(6), greedy(14))[0] for name in "abc"]
    drain(engine)
    assert any(step.preemptions for step in engine.records.steps)
    assert [r.output_token_ids for r in requests] == [expected(r)[0] for r in requests]


def test_an_error_of_an_event_names_the_request_it_was_about():
    engine = make_engine(AlwaysRaises())
    with pytest.raises(
        PolicyError, match="step 0: request 'r': AlwaysRaises.on_arrival raised ZeroDivisionError"
    ) as caught:
        engine.add_request("r", [1], greedy())
    assert (caught.value.policy, caught.value.request_id) == ("AlwaysRaises", "r")


class Mute(Exception):
    """Cannot say what it is about, and has something else under the name of a request's id."""

    request_id = property(lambda self: 1 / 0)

    def __str__(self) -> str:
        raise RuntimeError("no str")


class RaisesMute(PolicyScheduler):
    """Of no use either."""

    def order(self, view: EngineView):
        raise Mute
        yield


def test_an_error_whose_message_cannot_be_made_is_one_like_any_other():
    told = r"RaisesMute.schedule raised Mute \(its message could not be made: RuntimeError: no str\) "
    place = rf"\(in {re.escape(__file__)}:\d+, order\)"
    engine = make_engine(RaisesMute())
    engine.add_request("r", [1], greedy())
    with pytest.raises(PolicyError, match=f"^step 0: {told}{place}$"):
        engine.step()
    engine = make_engine(RaisesMute(), on_fault="go_on")
    request = engine.add_request("r", range(6), greedy(4))[0]
    drain(engine)
    assert request.output_token_ids == expected(request)[0]
    assert all(re.search(told, str(fault)) for fault in engine.faults.latest) and engine.faults.total > 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("on_fault", "ignore", "must be one of stop, go_on"), ("schedule_limit", 0.0, "must be seconds > 0")],
)
def test_what_follows_a_fault_is_checked(field, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(num_blocks=1, **{field: value})


# Waits.


class Batcher(PolicyScheduler):
    """Waits until `size` requests are there or the first has waited `patience` seconds, then serves them all."""

    size = 3
    patience = 1.0

    def order(self, view: EngineView):
        waiting = view.waiting
        if not view.running and len(waiting) < self.size and waiting:
            due = waiting[0].arrival_time + self.patience
            if view.now < due:
                self.wake_at = due
                return
        yield from view.running
        yield from waiting


def arrivals(*times: float) -> list[Arrival]:
    return [Arrival(at, f"r{index}", [1, 2, 3], greedy(1)) for index, at in enumerate(times)]


def started(engine) -> list[float]:
    return [r.first_scheduled_time for r in sorted(engine.records.requests, key=lambda r: r.request_id)]


def test_a_policy_may_wait_for_a_time():
    """Two arrive in time and are served a second after the first; three are served when the third is there."""
    engine = make_engine(Batcher(), stall_limit=2)
    replay(engine, arrivals(0.0, 0.5, 10.0, 10.25, 10.5, 20.0))
    assert started(engine) == [1.0, 1.0, 10.5, 10.5, 10.5, 21.0]


def test_a_step_lets_the_time_pass_for_which_the_policy_waits():
    """Whoever only calls step() gets the same: no busy loop, no stall."""
    engine = make_engine(Batcher(), stall_limit=2)
    engine.add_request("r", [1, 2, 3], greedy(1))
    assert engine.step() == [] and engine.idle and engine.wake_at == 1.0
    (output,) = engine.step()
    assert (output.request.id, engine.clock.now(), engine.wake_at) == ("r", 1.0, None)


def test_an_arrival_or_an_end_ends_the_wait():
    engine = make_engine(Batcher(), stall_limit=2)
    for name in "ab":
        engine.add_request(name, [1, 2, 3], greedy(1))
        engine.step()
        assert engine.wake_at == 1.0
    engine.abort("a")
    assert engine.wake_at is None
    engine.step()
    for name in "cd":
        engine.add_request(name, [1, 2, 3], greedy(1))
    engine.step()
    assert engine.clock.now() == 0.0 and not engine.has_unfinished


def test_a_wait_that_never_ends_is_a_stall():
    class Puts(Scheduler):
        def schedule(self, view: EngineView) -> SchedulePlan:
            return SchedulePlan(wake_at=view.now + 1.0)

    engine = make_engine(Puts(), stall_limit=20)
    with pytest.raises(StalledError, match="no request advanced in 20 steps"):
        replay(engine, arrivals(*(0.25 * index for index in range(100))))  # arrivals alone are no stall
    assert engine.clock.now() > 20


def test_a_time_that_is_past_is_no_wait():
    class Past(Scheduler):
        def schedule(self, view: EngineView) -> SchedulePlan:
            return SchedulePlan(wake_at=view.now - 1.0)

    engine = make_engine(Past(), stall_limit=20)
    engine.add_request("r", [1], greedy())
    with pytest.raises(StalledError):
        drain(engine)


def test_waits_are_written_down_and_replayed(tmp_path):
    log, again = DecisionLog(), DecisionLog()
    replay(make_engine(Batcher(), decisions=log), arrivals(0.0, 0.5, 7.0))
    log.write(tmp_path / "log.jsonl")
    kept = DecisionLog.read(tmp_path / "log.jsonl")
    assert kept == log and any(decision.wake_at == 1.0 for decision in kept.decisions)
    replay(make_engine(ReplayScheduler(kept.decisions), decisions=again), arrivals(0.0, 0.5, 7.0))
    assert again.decisions == log.decisions


def test_real_time_passes_too():
    class Later(PolicyScheduler):
        def order(self, view: EngineView):
            if view.now < 0.02:
                self.wake_at = 0.02
                return
            yield from view.running
            yield from view.waiting

    engine = make_engine(Later(), clock=MonotonicClock(), stall_limit=3)
    engine.add_request("r", [1], greedy(1), arrival_time=0.0)
    drain(engine)
    assert engine.records.requests[0].first_scheduled_time >= 0.02
