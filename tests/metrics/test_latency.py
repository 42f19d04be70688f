"""Latencies, against values computed by hand and the laws that tie them together."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research_engine import metrics
from research_engine.engine.records import Records, RequestRecord, StepRecord


def request(name: str, arrival: float = 0.0, times: tuple[float, ...] = (), **changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": name, "client": "", "priority": 0, "arrival_time": arrival,
        "first_scheduled_time": None, "first_token_time": times[0] if times else None,
        "last_token_time": times[-1] if times else None, "finish_time": times[-1] if times else None,
        "finish_reason": "length", "prompt_tokens": 8, "output_tokens": len(times), "max_tokens": 99,
        "cached_tokens": 0, "recomputed_tokens": 0, "preemptions": 0,
    }  # fmt: skip
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def step(executed: float, rows: dict[str, int], number: int = 0, **changes: object) -> StepRecord:
    """A step in which each named request drew that many tokens."""
    values: dict[str, object] = {
        "step": number, "started": executed - 0.5, "committed": executed - 0.4, "executed": executed,
        "finished": executed + 0.1, "request_ids": list(rows), "starts": [0] * len(rows), "num_tokens": [1] * len(rows),
        "drew": list(rows.values()), "num_running": len(rows), "num_waiting": 0, "blocks_used": 1, "blocks_cached": 0,
        "blocks_free": 1, "slots_stored": 1, "preemptions": [], "blocks_copied": 0, "blocks_swapped_in": 0,
        "blocks_swapped_out": 0,
    }  # fmt: skip
    return StepRecord(**(values | changes))  # type: ignore[arg-type]


def records_of(arrivals: dict[str, float], tokens: list[tuple[float, dict[str, int]]]) -> Records:
    """Records in which the named requests got their tokens at the given times."""
    records = Records(steps=[step(at, rows, number) for number, (at, rows) in enumerate(tokens)])
    for name, arrival in arrivals.items():
        times = tuple(at for at, rows in tokens for _ in range(rows.get(name, 0)))
        records.add_request(request(name, arrival, times))
    return records


def test_latencies_count_from_the_scheduled_arrival() -> None:
    record = request("a", 2.0, (3.5, 4.0, 6.0), first_scheduled_time=2.25)
    assert metrics.queueing_delay(record) == 0.25
    assert metrics.ttft(record) == 1.5
    assert metrics.e2e(record) == 4.0
    assert metrics.tpot(record) == 1.25  # (4.0 - 1.5) / 2
    assert metrics.normalized_latency(record) == pytest.approx(4 / 3)


def test_one_token_has_no_time_per_output_token() -> None:
    record = request("a", 0.0, (1.0,))
    assert math.isnan(metrics.tpot(record))
    assert metrics.ttft(record) == metrics.e2e(record) == 1.0


def test_a_request_without_tokens_has_no_latency() -> None:
    record = request("a", 0.0, (), finish_reason="refused")
    values = [
        metrics.ttft(record),
        metrics.e2e(record),
        metrics.normalized_latency(record),
        metrics.queueing_delay(record),
    ]
    assert all(map(math.isnan, values))


def test_gaps_are_pooled_and_not_averaged_per_request() -> None:
    records = records_of({"a": 0.0, "b": 0.0}, [(1.0, {"a": 1, "b": 1}), (3.0, {"a": 1}), (4.0, {"a": 1, "b": 1})])
    assert sorted(metrics.inter_token_latencies(records)) == [1.0, 2.0, 3.0]


def test_several_tokens_at_once_are_one_gap_and_zeros() -> None:
    records = records_of({"a": 0.0}, [(1.0, {"a": 1}), (2.5, {"a": 3})])
    assert metrics.inter_token_latencies(records) == [1.5, 0.0, 0.0]


def test_a_reused_id_keeps_the_tokens_of_its_two_lives_apart() -> None:
    records = records_of({}, [(at, {"a": 1}) for at in (1.0, 2.0, 10.0, 14.0)])
    records.add_request(request("a", 0.0, (1.0, 2.0)))
    records.add_request(request("a", 9.0, (10.0, 14.0)))
    assert metrics.request_token_times(records) == [[1.0, 2.0], [10.0, 14.0]]
    assert metrics.inter_token_latencies(records) == [1.0, 4.0]


def test_aborted_requests_are_not_pooled() -> None:
    records = records_of({"a": 0.0}, [(1.0, {"a": 1}), (2.0, {"a": 1})])
    records.requests[0].finish_reason = "abort"
    assert metrics.inter_token_latencies(records) == []
    assert metrics.summarize(records, block_size=1)["ttft"]["count"] == 0


@given(
    arrival=st.floats(0, 100),
    gaps=st.lists(st.tuples(st.floats(0.001, 50), st.integers(1, 3)), min_size=1, max_size=20),
)
def test_first_token_and_gaps_add_up_to_the_end(arrival: float, gaps: list[tuple[float, int]]) -> None:
    now, tokens = arrival, []
    for gap, count in gaps:
        now += gap
        tokens.append((now, {"a": count}))
    records = records_of({"a": arrival}, tokens)
    (record,) = records.requests
    total = metrics.ttft(record) + math.fsum(metrics.inter_token_latencies(records))
    assert total == pytest.approx(metrics.e2e(record), rel=1e-9, abs=1e-9)
    if record.output_tokens > 1:
        own = metrics.ttft(record) + metrics.tpot(record) * (record.output_tokens - 1)
        assert own == pytest.approx(metrics.e2e(record), rel=1e-9, abs=1e-9)
