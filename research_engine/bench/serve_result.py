"""The result of a load as one dictionary: vLLM's keys, and beside them what tells whether to believe it.

Latencies are those of docs/metrics.md, in milliseconds where vLLM's keys say so: from the scheduled arrival, of
completed requests alone, while failed ones stay in every denominator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from research_engine import metrics
from research_engine.bench.backends import Observation, output_tokens_of, token_gaps
from research_engine.bench.load import Load, LoadRun
from research_engine.engine.records import RequestRecord

BUSY_CPU = 0.9  # share of a core above which the client is taken for the bottleneck
LAGGING = 0.02  # seconds of the event loop's lag at P99, the same
DETAILS = ("input_lens", "output_lens", "start_times", "scheduled_times", "ttfts", "itls", "latencies",
           "generated_texts", "errors")  # fmt: skip
_BRIEF = 1.0  # seconds; what is shorter is a burst, in which a client is always busy
_FEWEST = 16  # requests that a slope is drawn through
_LOOKS = 400  # at the number of requests in the system, over the time of the arrivals


def serve_result(
    load: Load,
    run: LoadRun,
    *,
    slo: metrics.SLO | None,
    names: Sequence[str],
    percentiles: Sequence[float],
    count_tokens: Callable[[str], int] | None = None,
) -> dict[str, Any]:
    """Everything that is known of a run.

    Args:
        load, run: what was sent, and what came of it.
        slo: for goodput.
        names: latencies to give, of `serve_options.METRICS`.
        percentiles: of them.
        count_tokens: tokens of a text, for servers that do not count them.
    """
    seen = run.observations
    outputs = output_tokens_of(seen, count_tokens)
    records = [_record(index, one, outputs[index], run) for index, one in enumerate(seen)]
    done = [record for record in records if metrics.is_completed(record)]
    gaps = [token_gaps(one, tokens) if one.is_completed else [] for one, tokens in zip(seen, outputs, strict=True)]
    duration = run.end - run.start
    failed = sum(one.is_failed for one in seen)
    ended = len(done) + failed
    good = sum(map((slo or metrics.SLO()).is_met, records))
    inputs = sum(record.prompt_tokens for record in done)
    generated = sum(record.output_tokens for record in done)
    rate = (lambda count: count / duration) if duration > 0 else (lambda count: math.nan)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": failed,
        "unfinished": len(seen) - ended,
        "total_input_tokens": inputs,
        "total_output_tokens": generated,
        "request_throughput": rate(len(done)),
        "request_goodput": rate(good) if slo is not None else None,
        "slo_attainment": good / ended if slo is not None and ended else None,
        "output_throughput": rate(generated),
        "total_token_throughput": rate(inputs + generated),
        "max_output_tokens_per_s": _peak_tokens(seen, outputs, run),
        "max_concurrent_requests": _peak_requests(seen),
    }
    pools = {
        "ttft": [metrics.ttft(record) for record in done],
        "tpot": [metrics.tpot(record) for record in done],
        "itl": [gap for own in gaps for gap in own],
        "e2el": [metrics.e2e(record) for record in done],
        "client_queue_time": [one.sent - one.scheduled for one in seen if one.is_completed and one.sent is not None],
    }
    for name in names:
        result |= _statistics(name, pools[name], percentiles)
    result |= validity(load, run)
    own = [record if one.is_completed else None for one, record in zip(seen, records, strict=True)]
    return result | {  # what vLLM gives for a request that failed is 0
        "input_lens": [record.prompt_tokens for record in records],
        "output_lens": [0 if record is None else record.output_tokens for record in own],
        "start_times": [None if one.sent is None else one.sent - run.start for one in seen],
        "scheduled_times": [one.scheduled - run.start for one in seen],
        "ttfts": [0.0 if record is None else metrics.ttft(record) for record in own],
        "itls": gaps,
        "latencies": [0.0 if record is None else metrics.e2e(record) for record in own],
        "generated_texts": ["".join(one.text) for one in seen],
        "errors": [one.error or ("" if one.is_completed else "unfinished") for one in seen],
    }


def validity(load: Load, run: LoadRun) -> dict[str, Any]:
    """Whether to believe it: rates of sending, `void`, `unstable`, `latency_growth`, `client`, `warnings`.

    `void` holds the reasons why the load did not arrive as it was planned; empty when it did.
    """
    seen = run.observations
    wall = max(run.end - run.start, 1e-9)
    late = np.array([one.sent - one.scheduled for one in seen if one.sent is not None] or [0.0])
    lags = np.array(run.loop_lags or [0.0])
    client = {
        "cpu_share": run.cpu_seconds / wall,
        "loop_lag_p99_ms": float(np.percentile(lags, 99)) * 1e3,
        "loop_lag_max_ms": float(lags.max()) * 1e3,
        "late_send_p99_ms": float(np.percentile(late, 99)) * 1e3,
        "late_send_max_ms": float(late.max()) * 1e3,
        "connections": run.connections,
    }
    warnings, void, unstable = [], [], False
    if client["cpu_share"] > BUSY_CPU and wall > _BRIEF:
        warnings.append(
            f"the client used {client['cpu_share']:.0%} of a core: it, not the server, may be the bottleneck"
        )
    if client["loop_lag_p99_ms"] > LAGGING * 1e3:
        warnings.append(
            f"the client's event loop came {client['loop_lag_p99_ms']:.0f} ms late at P99: latencies hold its own delay"
        )
    if any(one.is_completed and one.output_tokens is None for one in seen) and load.streamed:
        warnings.append("the server sends no usage: tokens are counted by the tokenizer, or one a chunk without one")
    planned = sent = math.inf
    growth = 0.0
    if load.arrivals is not None and len(seen) > 1:
        rates = metrics.arrival_rates([one.scheduled for one in seen], [one.sent for one in seen], [])
        planned, sent = rates
        if rates.is_void:
            waits = load.max_concurrency is not None and _peak_requests(seen) >= load.max_concurrency
            why = "requests waited for max_concurrency" if waits else "the client sent late"
            void.append(f"{why}: {planned:.2f} req/s were to be sent, {sent:.2f} were")
        growth = latency_growth(seen)
        unstable = metrics.counts_grow([one.scheduled for one in seen], _in_system(seen))
    return {
        "planned_send_rate": planned if math.isfinite(planned) else "inf",
        "send_rate": sent if math.isfinite(sent) else "inf",
        "void": void,
        "unstable": unstable,
        "latency_growth": growth,
        "client": client,
        "warnings": warnings,
        "interrupted": run.is_interrupted,
    }


def latency_growth(seen: Sequence[Observation]) -> float:
    """Seconds by which the end-to-end latency grows in each second of arrivals; 0.0 where that may be chance.

    The slope of a least-squares line through (scheduled arrival, latency) of the completed requests, when it is above
    three standard errors. A server that does mu of lambda requests a second falls behind by lambda / mu - 1.
    """
    points = [(one.scheduled, (one.times[-1] if one.times else one.finished) - one.scheduled)
              for one in seen if one.is_completed and one.finished is not None]  # fmt: skip
    if len(points) < _FEWEST:
        return 0.0
    due, latency = np.array(points).T
    due = due - due.mean()
    spread = float(due @ due)
    if spread <= 0:
        return 0.0
    slope = float(due @ latency) / spread
    rest = latency - latency.mean() - slope * due
    error = math.sqrt(float(rest @ rest) / (len(points) - 2) / spread)
    return slope if slope > 3 * error else 0.0


def _record(index: int, seen: Observation, output_tokens: int, run: LoadRun) -> RequestRecord:
    """As the engine would have left it; the last token of an answer in one piece is its end."""
    if seen.is_completed:
        reason = "length" if seen.finish_reason == "length" else "stop"
    else:
        reason = "error" if seen.is_failed else "abort"
    prompt = seen.prompt_tokens if seen.prompt_tokens is not None else seen.sample.prompt_tokens
    return RequestRecord(
        request_id=str(index),
        client="",
        priority=0,
        arrival_time=seen.scheduled,
        first_scheduled_time=seen.sent,
        first_token_time=seen.times[0] if seen.times else None,
        last_token_time=seen.times[-1] if seen.times else seen.finished,
        finish_time=seen.finished if seen.finished is not None else run.end,
        finish_reason=reason,
        prompt_tokens=prompt or 0,
        output_tokens=output_tokens,
        max_tokens=seen.sample.output_tokens,
        cached_tokens=0,
        recomputed_tokens=0,
        preemptions=0,
    )


def _statistics(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Under vLLM's keys, in milliseconds; NaN without a value."""
    array = np.array([value for value in values if not math.isnan(value)]) * 1e3
    points = [f"p{point:g}_{name}_ms" for point in percentiles]
    if not array.size:
        return dict.fromkeys((f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *points), math.nan)
    out = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    return out | dict(zip(points, np.percentile(array, percentiles).tolist(), strict=True))


def _peak_tokens(seen: Sequence[Observation], outputs: Sequence[int], run: LoadRun) -> float:
    """Most output tokens in one second since the start; those beyond one a chunk go with the last chunk."""
    seconds: dict[int, int] = {}
    for one, tokens in zip(seen, outputs, strict=True):
        for time in one.times:
            seconds[int(time - run.start)] = seconds.get(int(time - run.start), 0) + 1
        if one.times and tokens > len(one.times):
            seconds[int(one.times[-1] - run.start)] += tokens - len(one.times)
    return float(max(seconds.values(), default=0))


def _changes(seen: Sequence[Observation]) -> list[tuple[float, int]]:
    """(time, +1 or -1) for every request that was sent; one that ends as another begins goes first."""
    changes = [(one.sent, 1) for one in seen if one.sent is not None]
    changes += [(one.finished, -1) for one in seen if one.sent is not None and one.finished is not None]
    return sorted(changes)


def _peak_requests(seen: Sequence[Observation]) -> int:
    count = peak = 0
    for _, change in _changes(seen):
        count += change
        peak = max(peak, count)
    return peak


def _in_system(seen: Sequence[Observation]) -> list[tuple[float, int]]:
    """Requests that were due and had no whole answer, at equal distances over the time of the arrivals."""
    due = np.sort([one.scheduled for one in seen])
    ended = np.sort([one.finished for one in seen if one.finished is not None])
    looks = np.linspace(due[0], due[-1], _LOOKS)
    counts = np.searchsorted(due, looks, "right") - np.searchsorted(ended, looks, "right")
    return list(zip(looks.tolist(), counts.tolist(), strict=True))
