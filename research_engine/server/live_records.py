"""Counts what steps and requests leave behind, and forgets them: a server runs for weeks.

The engine writes records as ever; here they become counters, histograms and a few steps for the timeline.
"""

from __future__ import annotations

from bisect import bisect_left

from research_engine.engine.records import Records, RequestRecord, StepRecord
from research_engine.server.wire import Snapshot, StepSummary

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
            80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
         20.0, 40.0, 80.0)  # fmt: skip
_WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
          1920.0, 7680.0)  # fmt: skip
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)

BUCKETS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _SECONDS,
    "inter_token_latency_seconds": _GAPS,
    "request_time_per_output_token_seconds": _GAPS,
    "e2e_request_latency_seconds": _WHOLE,
    "request_queue_time_seconds": _WHOLE,
    "request_prefill_time_seconds": _WHOLE,
    "request_decode_time_seconds": _WHOLE,
    "request_inference_time_seconds": _WHOLE,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "iteration_tokens_total": _STEP_TOKENS,
}
"""Upper bounds of each histogram's buckets; one more holds what lies above."""

COUNTERS = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")


class Histogram:
    """Counts by bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class LiveRecords(Records):
    """Records that keep totals alone.

    Args:
        num_blocks: of the KV cache, for its utilisation.
    """

    def __init__(self, num_blocks: int = 1) -> None:
        super().__init__()
        self.num_blocks = num_blocks
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._finished: dict[str, int] = {}
        self._histograms = {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
        self._last_token: dict[str, float] = {}  # of live requests that have drawn
        self._ended: list[str] = []  # in the step whose record is still to come, or aborted before it
        self._new_steps: list[StepSummary] = []

    def add_step(self, record: StepRecord) -> None:
        last, executed = self._last_token, record.executed
        gaps, decode = self._histograms["inter_token_latency_seconds"].observe, 0
        drawn = 0
        for name, start, count, drew in zip(
            record.request_ids, record.starts, record.num_tokens, record.drew, strict=True
        ):
            before = last.get(name)
            if before is not None and count == 1:
                decode += 1
            if drew:
                drawn += 1
                last[name] = executed
                if before is not None:
                    gaps(executed - before)
                else:
                    self._counters["prompt_tokens"] += start + count
        for name in self._ended:
            last.pop(name, None)
        self._ended.clear()
        total = sum(record.num_tokens)
        self._counters["generation_tokens"] += drawn
        self._counters["num_preemptions"] += len(record.preemptions)
        self._histograms["iteration_tokens_total"].observe(total)
        self._new_steps.append(
            StepSummary(record.step, record.started, record.finished, total, total - decode, decode, len(record.drew))
        )

    def add_request(self, record: RequestRecord) -> None:
        self._ended.append(record.request_id)
        reason = record.finish_reason
        self._finished[reason] = self._finished.get(reason, 0) + 1
        self._counters["prefix_cache_queries"] += record.prompt_tokens
        self._counters["prefix_cache_hits"] += record.cached_tokens
        observe = {name: histogram.observe for name, histogram in self._histograms.items()}
        observe["request_prompt_tokens"](record.prompt_tokens)
        observe["request_generation_tokens"](record.output_tokens)
        arrival, scheduled = record.arrival_time, record.first_scheduled_time
        first, last, end = record.first_token_time, record.last_token_time, record.finish_time
        if scheduled is not None:
            observe["request_queue_time_seconds"](scheduled - arrival)
        if reason not in ("stop", "length") or first is None or last is None or end is None or scheduled is None:
            return
        observe["time_to_first_token_seconds"](first - arrival)
        observe["e2e_request_latency_seconds"](last - arrival)
        observe["request_prefill_time_seconds"](first - scheduled)
        observe["request_decode_time_seconds"](last - first)
        observe["request_inference_time_seconds"](last - scheduled)
        if record.output_tokens > 1:
            observe["request_time_per_output_token_seconds"]((last - first) / (record.output_tokens - 1))

    def take_steps(self) -> list[StepSummary]:
        """Summaries of the steps since the last call."""
        steps, self._new_steps = self._new_steps, []
        return steps

    def snapshot(self, running: int, waiting: int, blocks_used: int) -> Snapshot:
        """Totals so far, with the engine's present state."""
        return Snapshot(
            running=running,
            waiting=waiting,
            kv_utilization=blocks_used / self.num_blocks,
            counters=dict(self._counters),
            finished=dict(self._finished),
            histograms={name: (list(kept.counts), kept.total) for name, kept in self._histograms.items()},
        )
