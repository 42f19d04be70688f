"""Batch means: the uncertainty of a mean within one run, whose successive values depend on each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from research_engine.engine.records import Records

from . import latency

BATCHES = 10
_LATENCIES = ("ttft", "tpot", "e2e", "normalized_latency", "queueing_delay")


@dataclass(frozen=True)
class BatchMeans:
    """Mean of a run and half its 95 % interval, from the means of batches of successive values (Law & Kelton).

    Attributes:
        mean: of all values.
        half_width: Student's t times the standard error of the batch means.
        batches: of equal size; the values that are left over belong to the last one.
        lag1: correlation of each batch mean with the next. Above 2 / sqrt(batches) the batches are too short to be
            independent and the interval is too narrow: run longer.
    """

    mean: float
    half_width: float
    batches: int
    lag1: float


def batch_means(values: Sequence[float], batches: int = BATCHES) -> BatchMeans | None:
    """Of values in order of time; NaN ones are left out. None for fewer than two values a batch.

    Raises:
        ValueError: batches below 2.
    """
    from scipy import stats

    if batches < 2:
        raise ValueError(f"batches = {batches!r}: must be an integer >= 2")
    array = np.array([value for value in values if not math.isnan(value)], dtype=np.float64)
    size = array.size // batches
    if size < 2:
        return None
    parts = [array[i * size : (i + 1) * size if i < batches - 1 else None] for i in range(batches)]
    means = np.array([part.mean() for part in parts])
    around = means - means.mean()
    spread = float(around @ around)
    lag1 = float(around[:-1] @ around[1:]) / spread if spread else 0.0
    error = float(stats.t.ppf(0.975, batches - 1)) * float(means.std(ddof=1)) / math.sqrt(batches)
    return BatchMeans(float(array.mean()), error, batches, lag1)


def batch_means_of(records: Records, start: float, end: float) -> dict[str, BatchMeans]:
    """Of every latency over completed requests in order of arrival, and of the output throughput over time.

    Args:
        records: of a run.
        start, end: clock seconds between which it ran; for the throughput, cut into as many equal parts.

    Returns:
        Name -> batch means; `output_throughput` in tokens per second. Names whose values are too few are left out.
    """
    done = [record for record in records.requests if latency.is_completed(record)]
    done.sort(key=lambda record: (record.arrival_time, record.request_id))
    found = {name: batch_means([getattr(latency, name)(record) for record in done]) for name in _LATENCIES}
    width = (end - start) / (2 * BATCHES)
    if width > 0:
        tokens = np.zeros(2 * BATCHES)
        for step in records.steps:
            tokens[min(2 * BATCHES - 1, max(0, int((step.executed - start) / width)))] += sum(step.drew)
        found["output_throughput"] = batch_means((tokens / width).tolist())
    return {name: means for name, means in found.items() if means is not None}
