"""Records as pandas frames and back, losslessly: with them every metric can be had from Parquet files alone."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from research_engine.engine.contract import PreemptionRecord
from research_engine.engine.records import Records, RequestRecord, StepRecord

from . import latency

if TYPE_CHECKING:
    import pandas as pd

_REQUEST_FIELDS = tuple(entry.name for entry in fields(RequestRecord))
_STEP_FIELDS = tuple(entry.name for entry in fields(StepRecord))
_TIMES = ("first_scheduled_time", "first_token_time", "last_token_time", "finish_time")
_LISTS = ("request_ids", "starts", "num_tokens", "drew", "blocks_held")


def requests_frame(records: Records) -> pd.DataFrame:
    """One row a request, in the order in which they ended: every field of RequestRecord, then its metrics in seconds.

    Columns added: completed, ttft, tpot, e2e, normalized_latency, queueing_delay (docs/metrics.md), and token_times,
    the clock seconds at which its tokens came out.
    """
    import pandas as pd

    frame = pd.DataFrame(
        [[getattr(r, name) for name in _REQUEST_FIELDS] for r in records.requests], columns=_REQUEST_FIELDS
    )
    for name in _TIMES:
        frame[name] = frame[name].astype("float64")
    frame["completed"] = [latency.is_completed(r) for r in records.requests]
    for metric in (latency.ttft, latency.tpot, latency.e2e, latency.normalized_latency, latency.queueing_delay):
        frame[metric.__name__] = [metric(r) for r in records.requests]
    frame["token_times"] = latency.request_token_times(records)
    return frame


def steps_frame(records: Records) -> pd.DataFrame:
    """One row a step: every field of StepRecord (preemptions as dictionaries), then counts and durations.

    Columns added: batch_size (rows), batch_tokens, new_tokens (drawn), num_preemptions, tokens_lost, and
    schedule_seconds, execute_seconds, update_seconds, which split the step.
    """
    import pandas as pd

    rows = []
    for step in records.steps:
        row = {name: getattr(step, name) for name in _STEP_FIELDS}
        row["preemptions"] = [event._asdict() for event in step.preemptions]
        row["batch_size"] = len(step.request_ids)
        row["batch_tokens"] = sum(step.num_tokens)
        row["new_tokens"] = sum(map(int, step.drew))
        row["num_preemptions"] = len(step.preemptions)
        row["tokens_lost"] = sum(event.tokens_lost for event in step.preemptions)
        row["schedule_seconds"] = step.committed - step.started
        row["execute_seconds"] = step.executed - step.committed
        row["update_seconds"] = step.finished - step.executed
        rows.append(row)
    added = ("batch_size", "batch_tokens", "new_tokens", "num_preemptions", "tokens_lost",
             "schedule_seconds", "execute_seconds", "update_seconds")  # fmt: skip
    return pd.DataFrame(rows, columns=[*_STEP_FIELDS, *added])


def read_frames(requests: pd.DataFrame, steps: pd.DataFrame) -> Records:
    """The records that `requests_frame` and `steps_frame` were made from, also after a round through Parquet.

    Raises:
        KeyError: a column is missing.
    """
    records = Records()
    for row in requests[list(_REQUEST_FIELDS)].to_dict("records"):
        for name in _TIMES:
            row[name] = None if row[name] != row[name] else float(row[name])
        records.add_request(RequestRecord(**row))
    for row in steps[list(_STEP_FIELDS)].to_dict("records"):
        for name in _LISTS:
            row[name] = _plain(row[name])
        row["preemptions"] = [PreemptionRecord(**event) for event in _plain(row["preemptions"])]
        records.add_step(StepRecord(**row))
    return records


def parquet_schema(name: str) -> Any:
    """The Arrow schema of "requests" or "steps", so that a run without preemptions has the same columns as one with."""
    import pyarrow as pa

    text, count, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    event = pa.struct([("request_id", text), ("mode", text), ("reason", text), ("blocks_freed", count),
                       ("tokens_lost", count), ("blocks_swapped", count)])  # fmt: skip
    special = {
        "request_id": text, "client": text, "finish_reason": text, "completed": flag, "token_times": pa.list_(real),
        "request_ids": pa.list_(text), "starts": pa.list_(count), "drew": pa.list_(flag),
    }  # fmt: skip
    if name == "steps":
        times = dict.fromkeys(("started", "committed", "executed", "finished"), real)
        special |= {
            "num_tokens": pa.list_(count),
            "blocks_held": pa.list_(count),
            "preemptions": pa.list_(event),
            **times,
        }
    columns = (requests_frame if name == "requests" else steps_frame)(Records()).columns
    latencies = ("ttft", "tpot", "e2e", "normalized_latency", "queueing_delay")

    def kind(column: str) -> Any:
        if column in special:
            return special[column]
        return real if column.endswith(("_time", "_seconds")) or column in latencies else count

    return pa.schema([(column, kind(column)) for column in columns])


def _plain(values: Any) -> list[Any]:
    """A list again, whatever Parquet made of it."""
    return values if isinstance(values, list) else list(values.tolist())
