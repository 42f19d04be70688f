"""Rates, goodput, memory and preemption of whole runs, against values computed by hand."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pandas as pd
import pytest

from research_engine import metrics
from research_engine.engine.contract import PreemptionRecord
from research_engine.engine.records import Records
from research_engine.metrics.frames import parquet_schema
from tests.metrics.test_latency import records_of, request, step


def test_rates_are_of_completed_requests_over_the_whole_duration() -> None:
    records = records_of({"a": 0.0, "b": 0.0}, [(1.0, {"a": 1, "b": 1}), (2.0, {"a": 1})])
    records.add_request(request("c", 0.0, (), finish_reason="abort"))
    summary = metrics.summarize(records, block_size=4, start=0.0, end=4.0)
    assert summary["num_requests"] == 3
    assert summary["num_failed"] == 1
    assert summary["request_throughput"] == 0.5
    assert summary["output_throughput"] == 0.75  # 3 tokens in 4 s
    assert summary["total_throughput"] == 4.75  # and two prompts of 8


def test_goodput_counts_failed_requests_as_bad() -> None:
    records = records_of({"a": 0.0, "b": 0.0}, [(1.0, {"a": 1}), (3.0, {"b": 1})])
    records.add_request(request("c", 0.0, (0.5,), finish_reason="abort"))
    records.add_request(request("d", 0.0, (), finish_reason="refused"))
    summary = metrics.summarize(records, block_size=4, start=0.0, end=2.0, slo=metrics.SLO(ttft=2.0))
    assert summary["goodput"] == 0.5
    assert summary["slo_attainment"] == 0.25


def test_an_slo_of_zero_seconds_is_refused() -> None:
    with pytest.raises(ValueError, match=r"slo\.tpot = 0: must be a number of seconds > 0"):
        metrics.SLO(tpot=0)


def test_percentiles_interpolate_and_leave_nan_out() -> None:
    values = metrics.percentiles([1.0, math.nan, 3.0, 2.0, 4.0])
    assert values["count"] == 4
    assert values["p50"] == 2.5
    assert values["p90"] == pytest.approx(3.7)
    assert values["mean"] == 2.5


def test_priorities_are_summarized_apart() -> None:
    records = records_of({"a": 0.0, "b": 0.0}, [(1.0, {"a": 1}), (3.0, {"b": 1})])
    records.requests[0].priority = -1
    by_priority = metrics.summarize(records, block_size=4)["by_priority"]
    assert {name: values["ttft"]["p50"] for name, values in by_priority.items()} == {"-1": 1.0, "0": 3.0}


def test_utilization_is_weighted_by_time_and_the_waste_is_split() -> None:
    records = Records()
    # 3 prompt and 4 output tokens in blocks of 4: it stores 6 tokens in the end (the last is never computed).
    first = step(1.0, {"a": 1}, started=0.0, finished=1.0, num_tokens=[3], blocks_used=1, blocks_free=3, slots_stored=3)
    second = step(4.0, {"a": 1}, started=1.0, finished=4.0, starts=[4], blocks_used=2, blocks_free=2, slots_stored=5)
    records.steps += [first, second]
    records.add_request(request("a", 0.0, (1.0, 4.0), prompt_tokens=3, output_tokens=4, finish_time=9.0))
    usage = metrics.kv_usage(records, block_size=4)
    allocated = 1 * 4 + 3 * 8
    assert usage.utilization == pytest.approx((1 * 3 + 3 * 5) / allocated)
    assert usage.internal == pytest.approx(3 * 2 / allocated)  # slots 6 and 7 of the second block are never filled
    assert usage.reserved == pytest.approx((1 * 1 + 3 * 1) / allocated)  # slot 3, then slot 5, are filled later
    assert usage.utilization + usage.internal + usage.reserved == pytest.approx(1.0)
    assert usage.occupancy == pytest.approx((1 * 0.25 + 3 * 0.5) / 4)
    assert usage.peak_occupancy == 0.5


def test_preemption_costs_add_up_over_events() -> None:
    records = Records()
    events = [PreemptionRecord("a", "recompute", "", 2, 30, 0), PreemptionRecord("b", "swap", "", 3, 0, 3)]
    records.steps += [step(1.0, {}, preemptions=events, blocks_swapped_out=3), step(2.0, {}, blocks_swapped_in=3)]
    records.add_request(request("a", 0.0, (1.0,), recomputed_tokens=20))
    cost = metrics.preemption_cost(records, bytes_per_block=100)
    assert (cost.events, cost.tokens_lost, cost.tokens_recomputed) == (2, 30, 20)
    assert (cost.blocks_swapped, cost.bytes_swapped) == (6, 600)
    assert cost.tokens_recomputed_per_event == 10


def test_frames_give_the_records_back_through_parquet(tmp_path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    records = records_of({"a": 0.0, "b": 0.5}, [(1.0, {"a": True, "b": False}), (2.0, {"b": True})])
    records.add_request(request("c", 0.0, (), finish_reason="refused"))
    records.steps[1].preemptions.append(PreemptionRecord("a", "recompute", "room", 2, 30, 0))
    for name, frame in (("requests", metrics.requests_frame(records)), ("steps", metrics.steps_frame(records))):
        table = pa.Table.from_pandas(frame, schema=parquet_schema(name), preserve_index=False)
        pq.write_table(table, tmp_path / f"{name}.parquet")
    back = metrics.read_frames(*(pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("requests", "steps")))
    assert back == records


def test_a_step_splits_into_schedule_execute_and_update() -> None:
    frame = metrics.steps_frame(records_of({"a": 0.0}, [(1.0, {"a": 1})]))
    row = frame.iloc[0]
    total = row["schedule_seconds"] + row["execute_seconds"] + row["update_seconds"]
    assert total == pytest.approx(row["finished"] - row["started"])


def test_trace_has_a_span_for_every_step_and_phase_of_a_request() -> None:
    records = records_of({"a": 0.25}, [(1.0, {"a": 1}), (2.0, {"a": 1})])
    records.requests[0].first_scheduled_time = 0.5
    records.steps[1].preemptions.append(PreemptionRecord("a", "swap", "room", 2, 30, 0))
    trace = json.loads(json.dumps(metrics.chrome_trace(records)))
    spans = {(e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {("queued", 250000, 250000), ("prefill", 500000, 500000), ("decode", 1000000, 1000000)} <= spans
    assert {("step 0", 500000, 600000), ("step 1", 1500000, 600000)} <= spans
    assert any(e["ph"] == "i" and e["name"] == "preempted (swap)" for e in trace["traceEvents"])


def test_metrics_work_without_torch() -> None:
    code = "import sys; import research_engine.metrics; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
