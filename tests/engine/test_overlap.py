"""Running one step ahead: the same tokens and decisions, stops found out late, and what is under way when it fails."""

from __future__ import annotations

from typing import Any

import pytest

import schedulers
from research_engine.engine.contract import UNKNOWN_TOKEN, Batch, Pending, StepResult
from research_engine.engine.decision_log import DecisionLog
from research_engine.engine.sampling_params import SamplingParams

from .shadow import ShadowExecutor, assert_empty, drain, expected, greedy, make_engine


class Device(ShadowExecutor):
    """Computes at once, and says so when asked; keeps the order in which it was asked."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.waited: list[int] = []
        self.unknown: list[str] = []  # requests whose last token a batch left to the device
        self.fault: Exception | None = None

    def execute(self, batch: Batch) -> Pending:
        self.unknown += [row.request.id for row in batch.rows if row.request.token_ids[-1] == UNKNOWN_TOKEN]
        result, device = super().execute(batch), self

        class Step:
            def wait(self) -> StepResult:
                device.waited.append(batch.step)
                if device.fault is not None:
                    raise device.fault
                return result

        return Step()


def overlapping(policy: Any = "chunked_prefill", **sizes: Any) -> Any:
    scheduler = schedulers.create(policy) if isinstance(policy, str) else policy
    engine = make_engine(scheduler, overlap=True, **sizes)
    engine.executor = Device(engine.config)
    return engine


@pytest.mark.parametrize("policy", schedulers.available())
def test_every_policy_decides_and_draws_as_without(policy):
    """Forced lengths, all there from the beginning, blocks scarce: also the decisions are the same, step by step."""
    plans, tokens = [], []
    for overlap in (False, True):
        log = DecisionLog()
        sizes = {"num_blocks": 12, "max_num_batched_tokens": 24, "overlap": overlap}
        engine = make_engine(schedulers.create(policy), decisions=log, **sizes)
        requests = [engine.add_request(str(i), range(7 * i, 7 * i + 7), greedy(5 + i % 4))[0] for i in range(8)]
        drain(engine)
        assert_empty(engine)
        plans.append([(decision.step, decision.tokens, decision.preempt) for decision in log.decisions])
        tokens.append([request.output_token_ids for request in requests])
    assert tokens[0] == tokens[1] == [expected(request)[0] for request in requests]
    if policy != "slo_aware":  # which looks at when the first token came out
        assert plans[0] == plans[1]


def test_a_step_is_handed_over_before_the_one_before_it_is_waited_for():
    engine = overlapping()
    engine.add_request("a", range(5), greedy(3))
    seen = []
    while engine.has_unfinished:
        outputs = engine.step()
        seen.append((len(engine.executor.batches), list(engine.executor.waited), len(outputs)))
    assert seen == [(1, [], 0), (2, [0], 1), (3, [0, 1], 1), (3, [0, 1, 2], 1)]
    assert engine.executor.unknown == ["a", "a"]


def test_a_request_that_stops_has_one_row_too_many_and_shows_none_of_it():
    engine = overlapping()
    prompt = list(range(6))
    (alone,) = make_engine(schedulers.create("fcfs")).add_request("x", prompt, greedy(8))
    tokens = expected(alone)[0]
    stop = tokens[3]
    most = tokens.index(stop) + 1
    (request,) = engine.add_request("a", prompt, SamplingParams(max_tokens=8, stop_token_ids=[stop], ignore_eos=True))
    (other,) = engine.add_request("b", range(20, 26), greedy(8))
    outputs = drain(engine)
    assert request.output_token_ids == tokens[:most] and request.finish_reason == "stop"
    assert [output.token_id for output in outputs if output.request is request] == tokens[:most]
    rows = sum(row.request is request for batch in engine.executor.batches for row in batch.rows)
    assert rows == most + 1, "the row after the stop was under way"
    assert other.output_token_ids == expected(other)[0]
    assert_empty(engine)


def test_a_request_whose_last_token_is_under_way_has_left_and_given_its_blocks_back():
    engine = overlapping()
    (request,) = engine.add_request("a", range(5), greedy(1))
    engine.step()
    assert not engine.queues.live and engine.kv_cache.num_used_blocks == 0
    assert engine.has_unfinished and request.finish_time is None and request.output_token_ids == [UNKNOWN_TOKEN]
    assert [output.finish_reason for output in engine.step()] == ["length"]
    assert not engine.has_unfinished and request.finish_time is not None


@pytest.mark.parametrize("most", [1, 5])
def test_an_abort_drops_the_token_under_way(most):
    engine = overlapping()
    (request,) = engine.add_request("a", range(5), greedy(most))
    engine.step()
    assert engine.abort("a") and not engine.abort("a")
    assert request.output_token_ids == [] and request.finish_reason == "abort"
    assert [record.output_tokens for record in engine.records.requests] == [0]
    engine.add_request("a", range(5), greedy(2))  # the id is free again, while the old row is still under way
    outputs = drain(engine)
    assert [output.request is request for output in outputs] == [False, False]
    assert_empty(engine)


def test_a_draw_that_needs_the_tokens_before_it_waits_for_them():
    engine = overlapping()
    (request,) = engine.add_request("a", range(5), greedy(4, presence_penalty=0.5))
    outputs = drain(engine)
    assert engine.executor.unknown == []
    assert [output.token_id for output in outputs] == request.output_token_ids == expected(request)[0]


def test_an_error_that_the_device_reports_late_ends_every_request_and_leaves_a_usable_engine():
    engine = overlapping()
    first = [engine.add_request(name, range(5), greedy(6))[0] for name in "ab"]
    engine.step()
    engine.executor.fault = RuntimeError("unspecified launch failure")
    with pytest.raises(RuntimeError, match="launch failure"):
        engine.step()
    assert [request.finish_reason for request in first] == ["error", "error"] and not engine.has_unfinished
    assert_empty(engine)
    engine.executor.fault = None
    (request,) = engine.add_request("c", range(5), greedy(3))
    drain(engine)
    assert request.output_token_ids == expected(request)[0]


def test_a_preempted_request_gets_the_token_that_was_under_way():
    """Two long requests in blocks for one and a half: somebody is preempted right after each of its steps."""
    engine = overlapping("fcfs", num_blocks=7, block_size=2)
    requests = [engine.add_request(name, range(4), greedy(7))[0] for name in "ab"]
    drain(engine)
    assert sum(request.num_preemptions for request in requests) > 0
    assert [request.output_token_ids for request in requests] == [expected(request)[0] for request in requests]
    assert all(UNKNOWN_TOKEN not in request.token_ids for request in requests)
