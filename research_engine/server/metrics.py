"""The engine's counts in Prometheus' text form, under the names that dashboards made for vLLM look for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from research_engine.server.engine_client import EngineClient
from research_engine.server.live_records import BUCKETS

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of requests that have drawn their first token.",
    "generation_tokens": "Tokens drawn.",
    "num_preemptions": "Requests that gave way to others.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between consecutive tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "e2e_request_latency_seconds": "From a request's arrival to its last token.",
    "request_queue_time_seconds": "From a request's arrival until it was first scheduled.",
    "request_prefill_time_seconds": "From a request's first step to its first token.",
    "request_decode_time_seconds": "From a request's first token to its last.",
    "request_inference_time_seconds": "From a request's first step to its last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens drawn for a request.",
    "iteration_tokens_total": "Tokens of a step.",
}
_CACHE_FACTS = {
    "block_size": "block_size",
    "num_gpu_blocks": "num_blocks",
    "num_cpu_blocks": "num_host_blocks",
    "enable_prefix_caching": "enable_prefix_caching",
}  # vLLM's label -> the engine's name
_OLD_NAMES = {"inter_token_latency_seconds": "time_per_output_token_seconds"}  # of vLLM before 0.11
_REASONS = ("stop", "length", "abort", "error")


def prometheus_text(client: EngineClient, model: str) -> bytes:
    """All metrics as they stand."""
    registry = CollectorRegistry()
    registry.register(_Collector(client, model))
    return generate_latest(registry)


class _Collector:
    def __init__(self, client: EngineClient, model: str) -> None:
        self._snapshot = client.snapshot
        self._config = {} if client.ready is None else client.ready.config
        self._labels, self._values = ["model_name", "engine"], [model, "0"]

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        for name, text, value in (
            ("num_requests_running", "Requests that hold KV blocks.", snapshot.running),
            ("num_requests_waiting", "Requests that wait.", snapshot.waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV cache's blocks that requests hold; 1 is all.",
                snapshot.kv_utilization,
            ),
            ("gpu_cache_usage_perc", "The same under vLLM's older name.", snapshot.kv_utilization),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=self._labels)
            gauge.add_metric(self._values, value)
            yield gauge
        facts = {told: str(self._config[name]) for told, name in _CACHE_FACTS.items() if name in self._config}
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, as labels.", labels=["engine", *facts])
        info.add_metric([self._values[1], *facts.values()], 1)
        yield info
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"vllm:{name}", text, labels=self._labels)
            counter.add_metric(self._values, snapshot.counters.get(name, 0))
            yield counter
        success = CounterMetricFamily(
            "vllm:request_success", "Requests ended, by reason.", labels=[*self._labels, "finished_reason"]
        )
        for reason in _REASONS:
            success.add_metric([*self._values, reason], snapshot.finished.get(reason, 0))
        yield success
        for name, text in _HISTOGRAMS.items():
            bounds = BUCKETS[name]
            counts, total = snapshot.histograms.get(name, ([0] * (len(bounds) + 1), 0.0))
            for told in filter(None, (name, _OLD_NAMES.get(name))):
                histogram = HistogramMetricFamily(f"vllm:{told}", text, labels=self._labels)
                histogram.add_metric(self._values, _cumulative(bounds, counts), total)
                yield histogram


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    buckets, below = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return buckets
