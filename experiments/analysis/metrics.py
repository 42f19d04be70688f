"""The numbers that tables and plots can show of a trial: where its summary has them, their names, units and digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from experiments.analysis.statistics import values_needed

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """How a number of a trial's summary is named and shown.

    Args:
        label: with its unit.
        read: takes it out of a summary; NaN where the summary has none.
        digits: after the point.
        better: which end is best; None for what is neither.
        count: values that a percentile was taken of, where their number decides whether it means anything.
        within: name of the run's batch means that tell its uncertainty within one run.
    """

    label: str
    read: Callable[[Summary], float]
    digits: int
    better: Literal["lower", "higher"] | None = None
    count: Callable[[Summary], float] | None = None
    within: str | None = None
    scale: float = 1.0

    def value(self, summary: Summary) -> float:
        """The number, or NaN where the trial has none or too few values support it."""
        return self.read(summary) if self.is_supported(summary) else math.nan

    def is_supported(self, summary: Summary) -> bool:
        """Whether there are values enough for the percentile (`statistics.values_needed`)."""
        return self.count is None or not self.count(summary) < values_needed(99)

    def within_run(self, summary: Summary) -> float:
        """Half the 95 % interval within the run, NaN where there is none."""
        means = summary.get("batch_means", {}).get(self.within)
        return math.nan if means is None else means["half_width"] * self.scale


def _at(*path: str, scale: float = 1.0) -> Callable[[Summary], float]:
    def read(summary: Summary) -> float:
        value: Any = summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return math.nan if value is None else float(value) * scale

    return read


def _most_urgent(metric: str, point: str) -> Callable[[Summary], float]:
    def read(summary: Summary) -> float:
        classes = summary["metrics"].get("by_priority")
        return _at(metric, point)(classes[min(classes, key=int)]) if classes else math.nan

    return read


def _latencies() -> dict[str, Metric]:
    out = {}
    for name, title, unit, scale, digits in (
        ("ttft", "TTFT", "s", 1.0, 2),
        ("tpot", "TPOT", "ms", 1e3, 0),
        ("itl", "ITL", "ms", 1e3, 0),
        ("e2e", "E2E", "s", 1.0, 2),
        ("normalized_latency", "Norm. latency", "ms/token", 1e3, 0),
        ("queueing_delay", "Queueing", "s", 1.0, 2),
    ):
        for point in ("mean", "p50", "p90", "p99"):
            label = f"{title} {point.upper() if point != 'mean' else 'mean'} ({unit})"
            count = _at("metrics", name, "count") if point == "p99" else None
            within = name if point == "mean" else None
            read = _at("metrics", name, point, scale=scale)
            out[f"{name}_{point}"] = Metric(label, read, digits, "lower", count, within, scale)
    return out


def _never_used(summary: Summary) -> float:
    """Internal and external waste together, which a reservation rounded up to a chunk makes hard to tell apart."""
    return sum(_at("metrics", "kv_split", part, scale=100)(summary) for part in ("internal", "external"))


METRICS: dict[str, Metric] = {
    **_latencies(),
    "urgent_ttft_p50": Metric("TTFT P50, urgent (s)", _most_urgent("ttft", "p50"), 2, "lower"),
    "urgent_ttft_p90": Metric("TTFT P90, urgent (s)", _most_urgent("ttft", "p90"), 2, "lower"),
    "urgent_e2e_p90": Metric("E2E P90, urgent (s)", _most_urgent("e2e", "p90"), 2, "lower"),
    "request_throughput": Metric("Requests/s", _at("metrics", "request_throughput"), 2, "higher"),
    "output_throughput": Metric(
        "Output tokens/s", _at("metrics", "output_throughput"), 1, "higher", within="output_throughput"
    ),
    "total_throughput": Metric("All tokens/s", _at("metrics", "total_throughput"), 1, "higher"),
    "goodput": Metric("Goodput (requests/s)", _at("metrics", "goodput"), 2, "higher"),
    "slo_attainment": Metric("SLO attainment (%)", _at("metrics", "slo_attainment", scale=100), 1, "higher"),
    "completed": Metric("Completed", _at("metrics", "num_completed"), 0),
    "failed": Metric("Failed", _at("metrics", "num_failed"), 0),
    "duration": Metric("Duration (s)", _at("metrics", "duration"), 1),
    "steps": Metric("Steps", _at("metrics", "num_steps"), 0),
    "batch_size": Metric("Mean batch", _at("metrics", "batch_size"), 1),
    "preemptions": Metric("Preemptions", _at("metrics", "preemption", "events"), 1, "lower"),
    "tokens_recomputed": Metric("Tokens recomputed", _at("metrics", "preemption", "tokens_recomputed"), 0, "lower"),
    "kv_utilization": Metric("KV utilization (%)", _at("metrics", "kv", "utilization", scale=100), 1, "higher"),
    "kv_token_states": Metric(
        "KV token states (%)", _at("metrics", "kv_split", "token_states", scale=100), 1, "higher"
    ),
    "kv_reserved": Metric("KV reserved (%)", _at("metrics", "kv_split", "reserved", scale=100), 1, "lower"),
    "kv_internal": Metric("KV internal waste (%)", _at("metrics", "kv_split", "internal", scale=100), 1, "lower"),
    "kv_external": Metric("KV external waste (%)", _at("metrics", "kv_split", "external", scale=100), 1, "lower"),
    "kv_never_used": Metric("KV never used (%)", _never_used, 1, "lower"),
    "kv_occupancy": Metric("KV blocks in use (%)", _at("metrics", "kv", "occupancy", scale=100), 1),
    "prefix_hit_rate": Metric("Prefix hits (%)", _at("metrics", "prefix_hit_rate", scale=100), 1),
    "service_difference_max": Metric(
        "Service diff. max (tokens/s)", _at("metrics", "service_difference", "max"), 2, "lower"
    ),
    "service_difference_mean": Metric(
        "Service diff. (tokens/s)", _at("metrics", "service_difference", "mean"), 2, "lower"
    ),
    "predictor_kendall_tau": Metric("Predictor's tau-b", _at("workload", "predictor_kendall_tau"), 2),
    "kernel_time_p50": Metric("Time P50 (us)", _at("metrics", "kernel_time", "p50", scale=1e6), 1, "lower"),
    "kernel_time_p25": Metric("Time P25 (us)", _at("metrics", "kernel_time", "p25", scale=1e6), 1, "lower"),
    "kernel_time_p75": Metric("Time P75 (us)", _at("metrics", "kernel_time", "p75", scale=1e6), 1, "lower"),
    "kernel_bandwidth": Metric("GB/s", _at("metrics", "bytes_per_second", scale=1e-9), 1, "higher"),
    "kernel_rate": Metric("GFLOP/s", _at("metrics", "operations_per_second", scale=1e-9), 1, "higher"),
    "kernel_roofline": Metric("Share of roofline (%)", _at("metrics", "roofline_share", scale=100), 1, "higher"),
    "kernel_error": Metric("Relative error", _at("metrics", "relative_error"), 6),
    "offered_rate": Metric("Planned to be sent (requests/s)", _at("offered_rate"), 3),
    "achieved_rate": Metric("Sent (requests/s)", _at("achieved_rate"), 3),
}

USUAL = (
    "ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99", "itl_p50", "itl_p90", "itl_p99",
    "e2e_p50", "e2e_p90", "e2e_p99", "urgent_ttft_p50", "urgent_ttft_p90", "output_throughput", "goodput",
    "slo_attainment", "failed", "service_difference_max", "prefix_hit_rate", "preemptions", "tokens_recomputed",
    "kv_utilization", "kv_occupancy", "offered_rate", "achieved_rate",
)  # fmt: skip
USUAL_OF_KERNELS = (
    "kernel_time_p50", "kernel_time_p25", "kernel_time_p75", "kernel_bandwidth", "kernel_rate", "kernel_roofline",
)  # fmt: skip
