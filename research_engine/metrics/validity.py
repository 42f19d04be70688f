"""Whether a run may be believed: did the load arrive as planned, and could the system keep up with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from research_engine.engine.records import Records, RequestRecord

VOID_BEYOND = 0.01
GROWTH = 1.5
_PARTS = 4


class ArrivalRates(NamedTuple):
    """Requests per second: as scheduled, and as they reached the engine."""

    offered: float
    achieved: float

    @property
    def is_void(self) -> bool:
        """Off by more than 1 %: the load generator was the bottleneck, so latencies say nothing of the system."""
        return self.achieved != self.offered and not abs(self.achieved - self.offered) <= VOID_BEYOND * self.offered


def arrival_rates(
    arrivals: Sequence[float], entered: Sequence[float | None], steps: Sequence[tuple[float, float]]
) -> ArrivalRates:
    """Offered and achieved arrival rate of an open-loop run.

    An engine looks at its queue between steps, so a request that arrives during a step is on time when it enters as
    the step ends; only what comes on top is the load generator's own delay and lowers the achieved rate. A refused
    request did not arrive.

    Args:
        arrivals: scheduled, in clock seconds, ascending.
        entered: when the engine took each, parallel to arrivals; None where it was refused.
        steps: (started, finished) of every step, ascending.

    Returns:
        (n - 1) / (last - first) of the scheduled times, and accepted requests over the same span plus the generator's
        worst delay; infinite for fewer than two arrivals or all at once.
    """
    span = arrivals[-1] - arrivals[0] if len(arrivals) > 1 else 0.0
    if span <= 0:
        return ArrivalRates(math.inf, math.inf if all(time is not None for time in entered) else 0.0)
    worst, at = 0.0, 0
    for arrival, time in zip(arrivals, entered, strict=True):
        if time is None:
            continue
        while at < len(steps) and steps[at][1] < arrival:
            at += 1
        due = steps[at][1] if at < len(steps) and steps[at][0] <= arrival else arrival
        worst = max(worst, time - due)
    accepted = sum(time is not None for time in entered)
    return ArrivalRates((len(arrivals) - 1) / span, max(0, accepted - 1) / (span + worst))


def queue_grows(records: Records) -> bool:
    """Unstable: requests come faster than they are served, so latencies depend on how long one looks.

    The time between the first and the last arrival is cut into four parts. The run is unstable when the mean number of
    requests in the system (running and waiting, over the part's steps) rises from each part to the next and is in the
    last one at least 1.5 times its mean over the three before.
    """
    arrivals = [record.arrival_time for record in records.requests]
    return counts_grow(arrivals, ((step.started, step.num_running + step.num_waiting) for step in records.steps))


def counts_grow(arrivals: Sequence[float], in_system: Iterable[tuple[float, int]]) -> bool:
    """`queue_grows` for whoever has no steps to look at, such as a client.

    Args:
        arrivals: scheduled, in seconds.
        in_system: (time, requests in the system), as often as one looked.
    """
    if len(arrivals) < 2 * _PARTS:
        return False
    first, last = min(arrivals), max(arrivals)
    width = (last - first) / _PARTS
    if width <= 0:
        return False
    counts: list[list[int]] = [[] for _ in range(_PARTS)]
    for time, count in in_system:
        part = int((time - first) / width)
        if 0 <= part < _PARTS:
            counts[part].append(count)
    means = [sum(part) / len(part) if part else 0.0 for part in counts]
    before = sum(means[:-1]) / (_PARTS - 1)
    rises = all(left < right for left, right in pairwise(means))
    return rises and means[-1] >= GROWTH * before


class QueueTrend(NamedTuple):
    """Whether a system keeps up with its arrivals.

    Attributes:
        grows: it does not, by the rule of `queue_grows`, with the number of requests in the system as each one arrives.
        growth: requests per second by which that number rises over the second half of the arrivals, by least squares;
            0 where it falls.
    """

    grows: bool
    growth: float


def queue_trend(requests: Sequence[RequestRecord]) -> QueueTrend:
    """The same from the requests' records alone, for runs that keep no steps.

    A request is in the system from its arrival to its last token; a refused one never is. Fewer than 8 tell nothing,
    nor do arrivals over less than four times as long as a request takes from its first step to its last token: the
    system is filling then, whatever comes later.
    """
    served = [record for record in requests if record.finish_time is not None]
    if len(served) < 2 * _PARTS:
        return QueueTrend(False, 0.0)
    arrivals = np.sort([record.arrival_time for record in served])
    ends = np.sort([record.finish_time for record in served])
    inside = np.arange(1, len(served) + 1) - np.searchsorted(ends, arrivals, side="right")
    span = arrivals[-1] - arrivals[0]
    if span <= 0 or span < _PARTS * service_seconds(served):
        return QueueTrend(False, 0.0)
    late = arrivals - arrivals[0] >= span / 2
    slope = np.polyfit(arrivals[late] - arrivals[0], inside[late], 1)[0] if late.sum() > 1 else 0.0
    return QueueTrend(
        counts_grow(arrivals.tolist(), zip(arrivals.tolist(), inside.tolist(), strict=True)), max(0.0, float(slope))
    )


def service_seconds(requests: Sequence[RequestRecord]) -> float:
    """Mean time from the first step of a request to its last token, waiting before it left out; 0 without any."""
    times = [
        record.last_token_time - record.first_scheduled_time
        for record in requests
        if record.last_token_time is not None and record.first_scheduled_time is not None
    ]
    return sum(times) / len(times) if times else 0.0
