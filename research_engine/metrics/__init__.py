"""One definition of each metric, computed from the engine's records alone; docs/metrics.md has the table."""

from __future__ import annotations

from .batch_means import BatchMeans, batch_means, batch_means_of
from .fairness import Service, ServiceDifference, client_rates, service_difference, service_of
from .frames import read_frames, requests_frame, steps_frame
from .latency import (
    e2e,
    inter_token_latencies,
    is_completed,
    normalized_latency,
    queueing_delay,
    request_token_times,
    tpot,
    ttft,
)
from .memory import KVSplit, KVUsage, PreemptionCost, kv_split, kv_usage, preemption_cost
from .summary import SLO, percentiles, summarize
from .trace import chrome_trace
from .validity import QueueTrend, arrival_rates, counts_grow, queue_grows, queue_trend, service_seconds

__all__ = [
    "BatchMeans", "KVSplit", "KVUsage", "PreemptionCost", "QueueTrend", "SLO", "Service", "ServiceDifference",
    "arrival_rates", "batch_means", "batch_means_of", "chrome_trace", "client_rates", "counts_grow", "e2e",
    "inter_token_latencies", "is_completed", "kv_split", "kv_usage", "normalized_latency", "percentiles",
    "preemption_cost", "queue_grows", "queue_trend", "queueing_delay", "read_frames", "request_token_times",
    "requests_frame", "service_difference", "service_of", "service_seconds", "steps_frame", "summarize", "tpot", "ttft",
]  # fmt: skip
