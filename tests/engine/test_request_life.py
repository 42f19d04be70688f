"""A request's way through the engine: refusals, aborts at every moment, ids used again, limits, and how it ends."""

from __future__ import annotations

import random

import pytest

from research_engine.engine.contract import Batch, EngineView, Preemption, SchedulePlan, Scheduler, StepResult
from research_engine.engine.engine import Engine
from research_engine.engine.errors import RequestError
from research_engine.engine.sampling_params import SamplingParams
from schedulers.chunked_prefill import ChunkedPrefill
from schedulers.fcfs import FCFS
from schedulers.priority import Priority

from .shadow import ManualClock, assert_empty, drain, expected, greedy, make_engine


class SwapAtFour(FCFS):
    """Swaps the request "victim" out at step 4 and leaves it out for ever."""

    def schedule(self, view: EngineView) -> SchedulePlan:
        plan = super().schedule(view)
        victim = next((r for r in view.running if r.id == "victim"), None)
        tokens = {k: v for k, v in plan.tokens.items() if view.step < 4 or k != "victim"}
        return SchedulePlan(tokens, [Preemption("victim", "swap")] if victim and view.step >= 4 else plan.preempt)


def engine_with_company(policy: Scheduler, **sizes: int) -> Engine:
    engine = make_engine(policy, num_host_blocks=8, **sizes)
    engine.add_request("before", range(60, 65), greedy(12))
    engine.add_request("victim", range(20), greedy(30))
    engine.add_request("after", range(70, 75), greedy(12))
    return engine


@pytest.mark.parametrize(
    ("moment", "policy", "sizes", "steps"),
    [
        ("waiting", FCFS, {"max_num_seqs": 1}, 2),
        ("in a chunked prefill", ChunkedPrefill, {"max_num_batched_tokens": 10}, 2),
        ("running", FCFS, {}, 3),
        ("swapped", SwapAtFour, {}, 6),
    ],
)
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_frees_everything_once_and_leaves_the_others_alone(moment, policy, sizes, steps, in_flight):
    """S11: whatever it was doing, alone or in the step in flight; no token of it comes out afterwards."""
    engine = engine_with_company(policy(), **sizes)
    victim = engine.queues.live["victim"]
    for _ in range(steps):
        engine.step()
    state = {
        "waiting": victim.status.value == "waiting",
        "in a chunked prefill": victim.is_running and 0 < victim.num_computed_tokens < 20,
        "running": victim.is_decoding,
        "swapped": victim.is_swapped and engine.kv_cache.num_free_host_blocks < 8,
    }
    assert state[moment]
    num_tokens = victim.num_tokens
    if in_flight:
        view = engine.view()
        batch = engine.commit(engine.plan(view), view)
        result = engine.execute(batch)
        assert engine.abort("victim")
        outputs = engine.update(batch, result)
    else:
        assert engine.abort("victim")
        outputs = []
    assert not engine.abort("victim")
    outputs += drain(engine)
    assert victim.num_tokens == num_tokens and victim.finish_reason == "abort"
    assert "victim" not in {output.request.id for output in outputs}
    ends = {r.request_id: (r.output_tokens, r.finish_reason) for r in engine.records.requests}
    assert ends["before"] == ends["after"] == (12, "length")
    assert_empty(engine)


def test_continuations_held_back_are_aborted_with_their_group():
    """S11: n = 3, before the prompt is computed; the two that no scheduler has seen yet end as well."""
    engine = make_engine(ChunkedPrefill(), max_num_batched_tokens=4)
    group = engine.add_request("g", range(10), greedy(n=3))
    engine.step()
    assert engine.num_unfinished == 3 and engine.view().num_waiting == 0
    assert engine.abort("g") and not engine.has_unfinished
    assert [r.finish_reason for r in group] == ["abort"] * 3
    assert len(engine.records.requests) == 3
    assert_empty(engine)


def test_a_policy_hears_of_each_arrival_and_each_end_once():
    """Continuations included; one that ended before its sibling's prompt was computed is never heard of."""

    class Listens(FCFS):
        def __post_init__(self):
            super().__post_init__()
            self.heard = []

        def on_arrival(self, request):
            self.heard.append(("arrival", request.id))

        def on_finish(self, request):
            self.heard.append(("finish", request.id))

    policy = Listens()
    engine = make_engine(policy)
    engine.add_request("a", [1, 2], greedy(2, n=2))
    engine.add_request("b", [1, 2], greedy(2))
    drain(engine)
    engine.add_request("c", [1, 2], greedy(2, n=3))
    engine.abort("c")
    names = ("a/0", "a/1", "b", "c/0")
    assert sorted(policy.heard) == sorted((event, name) for event in ("arrival", "finish") for name in names)
    assert all(policy.heard.index(("arrival", name)) < policy.heard.index(("finish", name)) for name in names)


def test_a_request_that_ended_while_the_step_was_in_flight_is_skipped():
    """S12: its late row is dropped without an error; the other row counts."""
    engine = make_engine(FCFS())
    a, b = (engine.add_request(name, [1, 2, 3], greedy(4))[0] for name in "ab")
    engine.step()
    view = engine.view()
    batch = engine.commit(engine.plan(view), view)
    result = engine.execute(batch)
    engine.abort("a")
    assert [output.request for output in engine.update(batch, result)] == [b]
    assert (a.num_output_tokens, b.num_output_tokens) == (1, 2)


def test_late_output_of_an_aborted_request_does_not_reach_the_next_of_the_same_id():
    """S13: cancel and resubmit between execute and update."""
    engine = make_engine(FCFS())
    (old,) = engine.add_request("x", [1, 2, 3], greedy(4))
    view = engine.view()
    batch = engine.commit(engine.plan(view), view)
    result = engine.execute(batch)
    engine.abort("x")
    (new,) = engine.add_request("x", [4, 5, 6], greedy(4))
    assert engine.update(batch, result) == []
    drain(engine)
    assert old.num_output_tokens == 0 and new.output_token_ids == expected(new)[0]
    assert [r.finish_reason for r in engine.records.requests] == ["abort", "length"]


@pytest.mark.parametrize(("first", "second"), [("x", "x"), ("x/1", "x"), ("x", "x/0")])
def test_a_duplicate_live_id_is_refused_and_the_engine_lives(first, second):
    """S13: the names of continuations count, too."""
    engine = make_engine(FCFS())
    n = {"x": 2, "x/0": 1, "x/1": 1}
    engine.add_request(first, [1, 2], greedy(2, n=n[first]))
    with pytest.raises(RequestError, match=f"request '{second}'.*is live"):
        engine.add_request(second, [1, 2], greedy(2, n=n[second]))
    drain(engine)
    engine.add_request(second, [1, 2], greedy(2, n=n[second]))
    drain(engine)
    assert_empty(engine)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2), (2, 3)])
def test_an_id_is_live_however_many_continuations_it_has(first, second):
    """S13: a group's own id is taken, too, though none of its continuations is called so."""
    engine = make_engine(FCFS())
    engine.add_request("x", [1, 2], greedy(2, n=first))
    with pytest.raises(RequestError, match="request 'x'.*is live"):
        engine.add_request("x", [3, 4], greedy(2, n=second))
    drain(engine)
    assert len(engine.records.requests) == first


@pytest.mark.parametrize("policy", [FCFS, ChunkedPrefill, Priority])
def test_a_prompt_at_the_models_limit_is_refused_and_one_below_it_is_served(policy):
    """S24: prompt = max_model_len and + 1 say the limit; max_model_len - 1 leaves room for one token."""
    engine = make_engine(policy(), max_model_len=16, max_num_batched_tokens=5)
    for length in (16, 17):
        with pytest.raises(RequestError, match=f"prompt has {length} tokens; with max_model_len = 16 at most 15"):
            engine.add_request("long", range(length), greedy(1))
    (request,) = engine.add_request("r", range(15), greedy(9))
    drain(engine)
    assert request.num_output_tokens == 1 and request.finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 50], "prompt holds token id 50; ids go from 0 to 49"),
        ([1, -2], "prompt holds token id -2"),
        ([1.5], "must be a sequence of 64-bit integers"),
        ("text", "must be a sequence of 64-bit integers"),
        ([2**70], "must be a sequence of 64-bit integers"),
        (None, "must be a sequence of 64-bit integers"),
    ],
)
def test_a_prompt_that_is_no_list_of_token_ids_is_refused(prompt, message):
    engine = make_engine(FCFS(), vocab_size=50)
    with pytest.raises(RequestError, match=message):
        engine.add_request("r", prompt, greedy())
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("arrival_time", float("nan"), "a finite number of clock seconds"),
        ("arrival_time", float("inf"), "a finite number of clock seconds"),
        ("arrival_time", "soon", "a finite number of clock seconds"),
        ("priority", None, "an integer"),
        ("priority", float("nan"), "an integer"),
        ("client", 5, "a text"),
        ("deadline", float("nan"), "a number of clock seconds"),
        ("predicted_tokens", -1, "an integer >= 0"),
        ("predicted_tokens", "many", "an integer >= 0"),
    ],
)
def test_what_policies_go_by_is_checked_before_they_see_it(name, value, rule):
    """A wrong fact is the request's fault, never the policy's, and the engine lives."""
    engine = make_engine(Priority())
    with pytest.raises(RequestError, match=f"request 'r': {name} is {value!r}; it must be {rule}"):
        engine.add_request("r", [1, 2], greedy(2), **{name: value})
    (good,) = engine.add_request("r", [1, 2], greedy(2), deadline=float("inf"), predicted_tokens=0)
    drain(engine)
    assert_empty(engine)
    assert good.output_token_ids == expected(good)[0]


@pytest.mark.parametrize("value", [-1, 2, 1.5, "1"])
def test_computed_tokens_that_leave_nothing_or_are_no_number_are_refused(value):
    with pytest.raises(RequestError, match=f"computed_tokens = {value} of 2 prompt tokens; it must be an integer"):
        make_engine(FCFS()).add_request("r", [1, 2], greedy(2), computed_tokens=value)


def test_an_id_that_is_no_string_is_refused():
    with pytest.raises(RequestError, match="its id must be a string"):
        make_engine(FCFS()).add_request(3, [1], greedy())  # type: ignore[arg-type]


def always(token_id: int):
    return lambda request, fingerprint: token_id


def test_length_and_end_token_together_mean_stop():
    """S18: max_tokens is reached on the EOS token."""
    engine = make_engine(FCFS(), choose=always(2), eos_token_ids=(2,))
    (request,) = engine.add_request("r", [5], SamplingParams(max_tokens=1))
    (output,) = drain(engine)
    assert output.finish_reason == request.finish_reason == "stop"


@pytest.mark.parametrize("ends", ["eos", "stop id"])
def test_no_end_token_counts_before_min_tokens(ends):
    """S17: min_tokens = 200 and an end token at every step."""
    engine = make_engine(FCFS(), choose=always(2), num_blocks=100, eos_token_ids=(2,) if ends == "eos" else ())
    sampling = SamplingParams(min_tokens=200, max_tokens=250, stop_token_ids=[2] if ends == "stop id" else [])
    (request,) = engine.add_request("r", [5], sampling)
    drain(engine)
    assert (request.num_output_tokens, request.finish_reason) == (200, "stop")


def test_ignore_eos_goes_on_past_the_models_end_token_but_not_past_its_own_stop_ids():
    engine = make_engine(FCFS(), choose=lambda r, _: 2 if r.num_output_tokens < 3 else 4, eos_token_ids=(2,))
    (request,) = engine.add_request("r", [5], SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[4]))
    drain(engine)
    assert request.output_token_ids == [2, 2, 2, 4] and request.finish_reason == "stop"


def seeded_outputs(policy: Scheduler, **sizes: int) -> tuple[list[list[int]], Engine]:
    """Four requests, two seeded, with an executor that keeps one random stream per request."""
    streams: dict = {}

    def choose(request, fingerprint):
        return streams.setdefault(request, random.Random(request.seed)).randrange(50)

    engine = make_engine(policy, choose=choose, **sizes)
    requests = []
    for i in range(4):
        sampling = SamplingParams(seed=i if i % 2 else None, max_tokens=10, n=2 if i == 3 else 1)
        requests += engine.add_request(str(i), range(100 * i, 100 * i + 9), sampling)
    drain(engine)
    assert_empty(engine)
    return [r.output_token_ids for r in requests], engine


@pytest.mark.parametrize("policy", [ChunkedPrefill, FCFS, Priority])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_seeded_request_draws_the_same_tokens_preempted_and_in_chunks(policy, preemption):
    """S21: one random number per output token, none for a partial chunk, none again for what is recomputed."""
    undisturbed, _ = seeded_outputs(policy(), num_blocks=64)
    small = policy(preemption=preemption, admission="chunk", watermark=0.0)
    disturbed, engine = seeded_outputs(small, num_blocks=7, num_host_blocks=7, max_num_batched_tokens=5)
    assert disturbed == undisturbed
    steps = engine.records.steps
    assert {p.mode for s in steps for p in s.preemptions} == {preemption}
    assert any(not drew for s in steps for drew in s.drew), "no prompt was split"


def test_requests_without_a_seed_draw_by_the_engines_seed_and_their_place():
    """Same seed, same run; another seed, another one; no two requests share a stream."""

    def seeds(seed: int) -> list[int]:
        engine = make_engine(FCFS(), seed=seed)
        return [r.seed for i in range(3) for r in engine.add_request(str(i), [1], SamplingParams(n=1 + i))]

    assert seeds(1) == seeds(1)
    assert not set(seeds(1)) & set(seeds(2))
    assert len(set(seeds(1))) == 6


def test_greedy_is_allowed_and_deterministic():
    """S25: temperature 0 twice, under different policies and batches."""

    def tokens(policy: Scheduler, company: int) -> list[int]:
        engine = make_engine(policy, choose=lambda r, f: f % 50 if r.sampling.is_greedy else 0)
        (request,) = engine.add_request("r", range(9), SamplingParams(temperature=0, max_tokens=8))
        for i in range(company):
            engine.add_request(str(i), range(30 * i, 30 * i + 5), greedy(5))
        drain(engine)
        return request.output_token_ids

    assert tokens(FCFS(), 0) == tokens(FCFS(), 3) == tokens(ChunkedPrefill(token_budget=2), 2)


def test_an_executor_that_fails_ends_every_request_and_the_engine_can_be_used_again():
    """Its cache's contents are unknown: nothing of them is found later."""
    engine = make_engine(FCFS())
    engine.add_request("a", range(9), greedy(5, n=2))
    engine.add_request("b", range(9), greedy(5))
    engine.step()

    def fail(batch: Batch) -> StepResult:
        raise MemoryError("device lost")

    engine.executor.before = fail  # type: ignore[attr-defined]
    with pytest.raises(MemoryError, match="device lost"):
        engine.step()
    assert not engine.has_unfinished
    assert {r.finish_reason for r in engine.records.requests} == {"error"} and len(engine.records.requests) == 3
    assert_empty(engine)
    engine.executor.before = None  # type: ignore[attr-defined]
    (request,) = engine.add_request("c", range(9), greedy(5))
    drain(engine)
    assert request.num_cached_tokens == 0 and request.output_token_ids == expected(request)[0]


def test_requests_wait_in_the_order_of_their_arrival_however_they_were_added():
    """A replay may add them in another order than that of their scheduled times."""
    engine = make_engine(FCFS(), max_num_seqs=1, clock=ManualClock(tick=0.01))
    for name, arrival in (("late", 3.0), ("early", 1.0), ("between", 2.0)):
        engine.add_request(name, [1], greedy(1), arrival_time=arrival)
    assert [r.id for r in engine.view().waiting] == ["early", "between", "late"]
    drain(engine)
    assert [r.request_id for r in engine.records.requests] == ["early", "between", "late"]
