"""Fairness between clients: service difference as the VTC paper (Sheng et al., OSDI 2024) evaluates it.

A client's service is its weighted tokens, 1 for an input token and 2 for an output token by default. As in the paper's
evaluation, a request's tokens are spread evenly over the time from its first token to its last. Over a window, with
s_c what client c received and d_c what it asked for (weighted tokens of its requests that arrived in the window), both
per second of the window, the difference is

    sum over clients of min(max over clients of s - s_c, |d_c - s_c|)

A client that got less than the best served one counts with what it lacks, but with no more than it asked for: a client
that sends little isn't treated unfairly. A run is judged by the largest and the mean difference over windows whose
centres are spread evenly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from research_engine.engine.records import Records

Floats = npt.NDArray[np.float64]


class Service(NamedTuple):
    """What one request got: `weighted_tokens`, evenly between its first and its last token; times in seconds."""

    client: str
    arrival: float
    first_token: float
    last_token: float
    weighted_tokens: float


@dataclass(frozen=True)
class ServiceDifference:
    """Differences in weighted tokens per second; all NaN when there was no window to look at.

    Attributes:
        max, mean, variance: over the windows.
        times: centres of the windows in seconds.
        differences: of the windows, parallel to `times`.
    """

    max: float
    mean: float
    variance: float
    times: tuple[float, ...]
    differences: tuple[float, ...]


def service_of(records: Records, *, weight_input: float = 1.0, weight_output: float = 2.0) -> list[Service]:
    """The service that the requests of a run got; those that never got a token are left out, as in the paper."""
    return [
        Service(
            r.client,
            r.arrival_time,
            r.first_token_time,
            r.last_token_time,
            weight_input * r.prompt_tokens + weight_output * r.output_tokens,
        )
        for r in records.requests
        if r.first_token_time is not None and r.last_token_time is not None
    ]


def read_vtc_responses(path: Path, *, weight_input: float = 1.0, weight_output: float = 2.0) -> list[Service]:
    """Results as the VTC paper's artifact publishes them: first line of a .jsonl file, `result.responses`.

    Raises:
        ValueError: the file's first line has another shape.
    """
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    try:
        return [
            Service(
                r["adapter_dir"],
                r["req_time"],
                r["req_time"] + r["first_token_latency"],
                r["req_time"] + r["request_latency"],
                weight_input * r["prompt_len"] + weight_output * r["output_len"],
            )
            for r in json.loads(line)["result"]["responses"]
            if r["first_token_latency"] != -1
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no results of the VTC artifact: {type(error).__name__}: {error}") from error


def client_rates(
    services: Sequence[Service], times: Sequence[float], *, window: float = 60.0
) -> tuple[list[str], Floats, Floats]:
    """Clients, and what they received and asked for, in weighted tokens per second.

    Args:
        services: of a run.
        times: centres of the windows.
        window: seconds, above 0.

    Returns:
        Clients in order of name; received [clients, times]; asked for [clients, times].
    """
    clients = sorted({service.client for service in services})
    rows = np.array([clients.index(service.client) for service in services], dtype=np.int64)
    arrival, first, last, weight = (
        np.array([service[index] for service in services], dtype=np.float64) for index in range(1, 5)
    )
    length = last - first
    received, wanted = np.zeros((2, len(clients), len(times)))
    for index, centre in enumerate(times):
        low, high = centre - window / 2, centre + window / 2
        overlap = np.clip(np.minimum(high, last) - np.maximum(low, first), 0, None)
        at_once = ((low <= first) & (first < high)).astype(np.float64)  # a single token has no extent in time
        share = np.divide(overlap, length, out=at_once, where=length > 0)
        received[:, index] = np.bincount(rows, weight * share, len(clients)) / window
        wanted[:, index] = np.bincount(rows, weight * ((low <= arrival) & (arrival <= high)), len(clients)) / window
    return clients, received, wanted


def service_difference(
    services: Iterable[Service],
    *,
    window: float = 60.0,
    start: float | None = None,
    end: float | None = None,
    intervals: int = 20,
) -> ServiceDifference:
    """Largest and mean service difference of a run, by the definition on top of this file.

    The centres divide the time from `start + window / 2` to `end` into `intervals` equal parts, the two ends left out.
    With start 0 and end 600 these are the windows of the paper's Table 2.

    Args:
        services: from `service_of` or `read_vtc_responses`.
        window: seconds.
        start, end: of the load, in clock seconds; first and last arrival when None. A load shorter than half a window
            holds no centre, so give `end` for requests that arrive all at once.
        intervals: at least 2.

    Raises:
        ValueError: window or intervals out of range.
    """
    if not window > 0:
        raise ValueError(f"window = {window!r}: must be a number of seconds > 0")
    if intervals < 2:
        raise ValueError(f"intervals = {intervals!r}: must be an integer >= 2")
    services = list(services)
    if start is None:
        start = min((service.arrival for service in services), default=math.nan)
    if end is None:
        end = max((service.arrival for service in services), default=math.nan)
    first = start + window / 2
    if not end > first:
        return ServiceDifference(math.nan, math.nan, math.nan, (), ())
    times = [first + (end - first) * index / intervals for index in range(1, intervals)]
    _, received, wanted = client_rates(services, times, window=window)
    lacks = np.minimum(received.max(axis=0) - received, np.abs(wanted - received))
    differences = lacks.sum(axis=0)
    return ServiceDifference(
        float(differences.max()), float(differences.mean()), float(differences.var()),
        tuple(times), tuple(differences.tolist()),
    )  # fmt: skip
