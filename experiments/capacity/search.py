"""Bisection for the highest rate that meets the limits, seed by seed, and the fewest copies that carry a traffic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from experiments.analysis.statistics import Interval, bootstrap_interval

MOST_DOUBLINGS = 12
MOST_COPIES = 512


class Measured(Protocol):
    """What one run says of itself."""

    def meets(self, attainment: float) -> bool: ...


@dataclass
class Capacity:
    """The highest rates found.

    Attributes:
        rates: seed -> requests per second; 0 where even the lowest rate tried misses the limits.
        interval: their mean, with its 95 % interval over the seeds.
        runs: every run, by seed, in the order in which they were made.
    """

    rates: dict[int, float]
    interval: Interval
    runs: dict[int, list[Measured]] = field(default_factory=dict)


def find_capacity(
    run: Callable[[float, int], Measured],
    most: Callable[[int], float],
    seeds: Sequence[int],
    *,
    attainment: float,
    tolerance: float = 0.02,
    progress: Callable[[int, float], None] = lambda seed, rate: None,
) -> Capacity:
    """Bisect for each seed on its own.

    Every seed's arrivals at another rate are the same ones, stretched, so that attainment falls with the rate but for
    small steps; the answer is a rate that meets the limits with one above it, within the tolerance, that does not.

    Args:
        run: (rate, seed) -> what came out.
        most: seed -> a rate at which the search begins; it is passed by doubling if it meets the limits.
        seeds: the more, the narrower the interval.
        attainment: share of the requests that must meet the limits.
        tolerance: relative width at which the bisection ends.
        progress: is told seed and rate before each run.
    """
    rates: dict[int, float] = {}
    runs: dict[int, list[Measured]] = {}
    for seed in seeds:
        made = runs[seed] = []

        def meets(rate: float, seed: int = seed, made: list[Measured] = made) -> bool:
            progress(seed, rate)
            made.append(run(rate, seed))
            return made[-1].meets(attainment)

        rates[seed] = _bisect(meets, most(seed), tolerance)
    return Capacity(rates, bootstrap_interval(list(rates.values())), runs)


def _bisect(meets: Callable[[float], bool], begin: float, tolerance: float) -> float:
    low, high = 0.0, begin
    for _ in range(MOST_DOUBLINGS):
        if not meets(high):
            break
        low, high = high, 2 * high
    else:
        return low  # the limits bind nothing that was tried
    if low == 0.0:
        low = high / 2
        for _ in range(MOST_DOUBLINGS):
            if meets(low):
                break
            low, high = low / 2, low
        else:
            return 0.0
    while high - low > tolerance * low:
        middle = (low + high) / 2
        if meets(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Copies:
    """How many copies of a layout a traffic needs.

    Attributes:
        needed: seed -> the fewest that met the limits; one fewer did not.
        runs: (copies, seed) -> what came out.
    """

    needed: dict[int, int]
    runs: dict[tuple[int, int], Measured]

    @property
    def safe(self) -> int:
        """Enough under every seed."""
        return max(self.needed.values())


def find_copies(
    run: Callable[[int, int], Measured],
    guess: int,
    seeds: Sequence[int],
    *,
    attainment: float,
    most: int = MOST_COPIES,
    progress: Callable[[int, int], None] = lambda seed, copies: None,
) -> Copies:
    """From a guess up or down, until one number meets the limits and one fewer does not.

    Args:
        run: (copies, seed) -> what came out at the traffic's rate.
        guess: where to begin.
        most: copies to try at most.

    Raises:
        ValueError: even `most` copies miss the limits.
    """
    runs: dict[tuple[int, int], Measured] = {}
    needed = {}
    for seed in seeds:

        def meets(copies: int, seed: int = seed) -> bool:
            if (copies, seed) not in runs:
                progress(seed, copies)
                runs[copies, seed] = run(copies, seed)
            return runs[copies, seed].meets(attainment)

        low, high = 0, max(1, min(guess, most))
        step = max(1, math.ceil(0.05 * high))
        while not meets(high):
            if high == most:
                raise ValueError(f"{most} copies still miss the limits: they do not hold for a single request, or so")
            low, high, step = high, min(most, high + step), 2 * step
        step = max(1, math.ceil(0.05 * high))
        while low == 0 and high > 1:
            tried = max(1, high - step)
            if not meets(tried):
                low = tried
            else:
                high, step = tried, 2 * step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle) else (middle, high)
        needed[seed] = high
    return Copies(needed, runs)
