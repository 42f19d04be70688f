"""Latency of one request, and the gaps between tokens, all in seconds and all from the *scheduled* arrival."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from research_engine.engine.records import Records, RequestRecord, StepRecord

COMPLETED = ("stop", "length")


def is_completed(record: RequestRecord) -> bool:
    """It got all its tokens; aborted, refused and failed requests did not, and their latencies are not pooled."""
    return record.finish_reason in COMPLETED


def ttft(record: RequestRecord) -> float:
    """Time to first token: first token out - scheduled arrival; NaN when no token came."""
    return _difference(record.first_token_time, record.arrival_time)


def e2e(record: RequestRecord) -> float:
    """End-to-end latency: last token out - scheduled arrival; NaN when no token came."""
    return _difference(record.last_token_time, record.arrival_time)


def tpot(record: RequestRecord) -> float:
    """Time per output token after the first: (E2E - TTFT) / (output tokens - 1); NaN below two tokens."""
    if record.output_tokens < 2:
        return math.nan
    return (e2e(record) - ttft(record)) / (record.output_tokens - 1)


def normalized_latency(record: RequestRecord) -> float:
    """E2E / output tokens (PagedAttention, SOSP'23, and Orca); NaN when no token came."""
    return e2e(record) / record.output_tokens if record.output_tokens else math.nan


def queueing_delay(record: RequestRecord) -> float:
    """First scheduled - scheduled arrival; NaN when it never ran."""
    return _difference(record.first_scheduled_time, record.arrival_time)


def request_token_times(records: Records) -> list[list[float]]:
    """When each token of each request came out, in clock seconds; parallel to `records.requests`.

    A token comes out when the executor of its step returned. An id may be used again once its request has ended, so a
    request's tokens are those between its own first and last token.
    """
    times = _times_by_id(records.steps)
    out: list[list[float]] = []
    for record in records.requests:
        own = times.get(record.request_id, [])
        if record.first_token_time is None or record.last_token_time is None:
            out.append([])
        else:
            out.append(own[bisect_left(own, record.first_token_time) : bisect_right(own, record.last_token_time)])
    return out


def inter_token_latencies(records: Records, requests: Iterable[RequestRecord] | None = None) -> list[float]:
    """ITL: gaps between consecutive tokens, pooled over completed requests; never averaged per request first.

    Tokens that come out together count as one gap and zeros, so the gaps of a request always sum to E2E - TTFT.

    Args:
        records: of a run.
        requests: pool these of its requests only; all completed ones when None.
    """
    wanted = None if requests is None else {id(record) for record in requests}
    gaps: list[float] = []
    for record, times in zip(records.requests, request_token_times(records), strict=True):
        if is_completed(record) and (wanted is None or id(record) in wanted):
            gaps.extend(after - before for before, after in pairwise(times))
    return gaps


def _times_by_id(steps: Sequence[StepRecord]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for step in steps:
        for name, drew in zip(step.request_ids, step.drew, strict=True):
            if drew:
                times.setdefault(name, []).extend([step.executed] * int(drew))
    return times


def _difference(later: float | None, earlier: float) -> float:
    return math.nan if later is None else later - earlier
