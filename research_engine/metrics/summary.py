"""A run in one dictionary of plain numbers: percentiles, rates, memory and preemption, each by docs/metrics.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from research_engine.engine.records import Records, RequestRecord

from . import latency
from .fairness import service_difference, service_of
from .memory import kv_split, kv_usage, preemption_cost

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2e", "normalized_latency", "queueing_delay")


@dataclass(frozen=True)
class SLO:
    """What a request must keep to count as good; seconds, None where nothing is asked.

    Raises:
        ValueError: a limit is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and not value > 0:
                raise ValueError(f"slo.{entry.name} = {value!r}: must be a number of seconds > 0")

    def is_met(self, record: RequestRecord) -> bool:
        """Completed, and within every limit; a request of one token has no TPOT and meets any limit on it."""
        if not latency.is_completed(record):
            return False
        limits = ((self.ttft, latency.ttft), (self.tpot, latency.tpot), (self.e2e, latency.e2e))
        return not any(limit is not None and metric(record) > limit for limit, metric in limits)


def percentiles(values: Iterable[float], points: Sequence[int] = PERCENTILES) -> dict[str, float]:
    """Count, mean, extremes and percentiles (linear between order statistics) of the values that are not NaN."""
    array = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
    out: dict[str, float] = {"count": int(array.size)}
    if not array.size:
        return out | dict.fromkeys(("mean", "min", "max", *(f"p{point}" for point in points)), math.nan)
    out |= {"mean": float(array.mean()), "min": float(array.min()), "max": float(array.max())}
    return out | {f"p{point}": float(np.percentile(array, point)) for point in points}


def latency_summary(records: Records, requests: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Percentiles of every latency over those of `requests` (of this run) that completed."""
    done = [record for record in requests if latency.is_completed(record)]
    out = {}
    for name in LATENCIES:
        values = (
            latency.inter_token_latencies(records, done) if name == "itl" else [getattr(latency, name)(r) for r in done]
        )
        out[name] = percentiles(values)
    return out


def summarize(
    records: Records,
    *,
    block_size: int,
    start: float | None = None,
    end: float | None = None,
    slo: SLO | None = None,
    bytes_per_block: float | None = None,
) -> dict[str, Any]:
    """Everything that tables show of a run.

    Args:
        records: of one run with all its requests ended.
        block_size: token slots per KV block.
        start: clock seconds when the load began; the first scheduled arrival when None.
        end: clock seconds when the last step ended; taken from the records when None.
        slo: for goodput; without one every completed request is good.
        bytes_per_block: to give swapped blocks in bytes.

    Returns:
        `num_requests`, `num_completed`, `num_failed`, `duration` (end - start), `num_steps`, token counts; rates per
        second (`request_throughput`, `output_throughput`, `total_throughput`: tokens of completed requests / duration),
        `goodput`, `slo_attainment` (of *all* requests); `ttft`, `tpot`, `itl`, `e2e`, `normalized_latency`,
        `queueing_delay` as percentiles over completed requests; `by_priority` with the same six for each priority
        where there are several, and `service_difference` where there are several clients; `kv`, `kv_split`,
        `preemption`; `batch_size`, the mean over steps; `prefix_hit_rate` (cached / prompt tokens).
    """
    requests, steps = records.requests, records.steps
    done = [record for record in requests if latency.is_completed(record)]
    if start is None:
        start = min((record.arrival_time for record in requests), default=math.nan)
    if end is None:
        end = max((step.finished for step in steps), default=start)
    duration = end - start
    output = sum(record.output_tokens for record in done)
    prompt = sum(record.prompt_tokens for record in done)
    rate = (lambda count: count / duration) if duration > 0 else (lambda count: math.nan)
    good = sum(map((slo or SLO()).is_met, requests))
    summary: dict[str, Any] = {
        "num_requests": len(requests),
        "num_completed": len(done),
        "num_failed": len(requests) - len(done),
        "duration": duration,
        "num_steps": len(steps),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "request_throughput": rate(len(done)),
        "output_throughput": rate(output),
        "total_throughput": rate(prompt + output),
        "goodput": rate(good),
        "slo_attainment": good / len(requests) if requests else math.nan,
        **latency_summary(records, requests),
        "kv": asdict(kv_usage(records, block_size=block_size)),
        "kv_split": asdict(kv_split(records, block_size=block_size)),
    }
    cost = preemption_cost(records, bytes_per_block=bytes_per_block)
    summary["preemption"] = asdict(cost) | {
        "tokens_recomputed_per_event": cost.tokens_recomputed_per_event,
        "bytes_swapped_per_event": cost.bytes_swapped_per_event,
    }
    rows = [len(step.request_ids) for step in steps]
    summary["batch_size"] = sum(rows) / len(rows) if rows else math.nan
    everything = sum(record.prompt_tokens for record in requests)
    summary["prefix_hit_rate"] = sum(r.cached_tokens for r in requests) / everything if everything else math.nan
    summary["by_priority"] = _by_priority(records)
    summary["service_difference"] = _between_clients(records)
    return summary


def _by_priority(records: Records) -> Mapping[str, Any]:
    classes = sorted({record.priority for record in records.requests})
    if len(classes) < 2:
        return {}
    members = {value: [r for r in records.requests if r.priority == value] for value in classes}
    return {
        str(value): {"num_requests": len(members[value])} | latency_summary(records, members[value])
        for value in classes
    }


def _between_clients(records: Records) -> Mapping[str, float]:
    """Largest and mean service difference over 60 s windows; empty for fewer than two clients."""
    if len({record.client for record in records.requests}) < 2:
        return {}
    difference = service_difference(service_of(records))
    return {"max": difference.max, "mean": difference.mean}
