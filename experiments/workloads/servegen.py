"""ServeGen's clients (Alibaba; Apache-2.0): renewal processes whose rate and burstiness change every ten minutes."""

from __future__ import annotations

import csv
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from experiments.workloads.samples import WorkloadError

_CHUNK = 256  # gaps drawn at once


@dataclass(frozen=True)
class Window:
    """One window of a client: from when, requests per second, and the distribution of its gaps by shape alone."""

    start: float
    rate: float
    distribution: str
    shape: float


@dataclass(frozen=True)
class Client:
    """A client's windows in order of time; `width` seconds each."""

    name: str
    windows: tuple[Window, ...]
    width: float

    def at(self, time: float) -> int:
        """Index of the window that holds a time; past the end it begins again."""
        return int(time / self.width) % len(self.windows)


def read_client(path: Path) -> Client:
    """A file without header: start (s), rate (1/s), cv, Gamma or Weibull, shape, scale.

    The scale is not used: with it and the shape the gaps' mean is not always the stated rate's, which is kept.

    Raises:
        WorkloadError: another shape.
    """
    windows = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for index, row in enumerate(csv.reader(file), 1):
                start, rate, _, distribution, shape = (*map(float, row[:3]), row[3], float(row[4] or "nan"))
                if rate > 0 and not (distribution in ("Gamma", "Weibull") and shape > 0):
                    raise WorkloadError(f"{path.name}, record {index}: {row!r}: gaps must be Gamma or Weibull")
                windows.append(Window(start, rate, distribution, shape))
    except (OSError, UnicodeDecodeError, ValueError, IndexError, csv.Error) as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"{path}: no client of ServeGen: {type(error).__name__}: {error}") from error
    if len(windows) < 2:
        raise WorkloadError(f"{path}: no client of ServeGen: it has {len(windows)} windows, at least 2 are needed")
    starts = [window.start for window in windows]
    if not all(math.isfinite(window.start + window.rate) for window in windows) or sorted(set(starts)) != starts:
        raise WorkloadError(f"{path}: no client of ServeGen: its windows' starts must rise and rates must be numbers")
    return Client(path.stem.removesuffix("-trace"), tuple(windows), windows[1].start - windows[0].start)


def superpose(
    clients: Sequence[Client], count: int, rng: np.random.Generator, start: float, rate: float | None
) -> tuple[list[float], list[str]]:
    """The first `count` arrivals of all clients together, and who sends each.

    Args:
        clients: each draws from a stream of its own.
        rng: parent of those streams.
        start: seconds into the recording.
        rate: of all together in the window of `start`; as recorded when None.

    Raises:
        WorkloadError: nobody sends anything from `start` on.
    """
    recorded = sum(client.windows[client.at(start)].rate for client in clients)
    if not any(window.rate for client in clients for window in client.windows) or (rate and not recorded):
        raise WorkloadError(f"servegen: no client sends anything at {start:g} s")
    factor = 1.0 if rate is None else rate / recorded
    streams = rng.spawn(len(clients))
    merged = heapq.merge(*(_arrivals(c, s, start, factor) for c, s in zip(clients, streams, strict=True)))
    first = list(islice(merged, count))
    return [time for time, _ in first], [name for _, name in first]


def _arrivals(client: Client, rng: np.random.Generator, start: float, factor: float) -> Iterator[tuple[float, str]]:
    """Window after window, without end, unless the client never sends anything."""
    if not any(window.rate for window in client.windows):
        return
    begin = start
    while True:
        window, end = client.windows[client.at(begin)], (math.floor(begin / client.width) + 1) * client.width
        time, rate = begin, window.rate * factor
        while rate > 0 and time < end:
            for gap in _gaps(window, rng).tolist():
                time += gap / rate
                if time >= end:
                    break
                yield time - start, client.name
        begin = end


def _gaps(window: Window, rng: np.random.Generator) -> np.ndarray:
    """Gaps of mean 1."""
    if window.distribution == "Gamma":
        return rng.gamma(window.shape, 1 / window.shape, _CHUNK)
    return rng.weibull(window.shape, _CHUNK) / math.gamma(1 + 1 / window.shape)
