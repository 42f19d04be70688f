"""When requests arrive: open loop, computed beforehand, in seconds after the start; or closed loop, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from experiments.settings import Settings
from experiments.workloads.samples import Sample, WorkloadError
from experiments.workloads.servegen import read_client, superpose
from experiments.workloads.trace_files import existing_file

Floats = npt.NDArray[np.float64]
_NEEDS: dict[str, tuple[str, ...]] = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "constant": ("rate",),
    "on_off": ("rate", "on", "off"),
    "ramp": ("rate", "end_rate", "duration"),
    "diurnal": ("rate", "amplitude", "period"),
    "trace": (),
    "servegen": ("clients",),
    "at_once": (),
    "closed_loop": ("concurrency",),
}
_MAY_HAVE: dict[str, tuple[str, ...]] = {
    "trace": ("rate",),
    "servegen": ("rate", "start"),
    "closed_loop": ("think_time",),
}


class ArrivalSettings(Settings):
    """An arrival process.

    Args:
        process:
            `poisson`; `gamma` (renewal process whose gaps have the coefficient of variation `cv`: above 1 bursty);
            `constant` (equal gaps);
            `on_off` (Poisson for `on` seconds, silent for `off`, in turn); `ramp` (Poisson from `rate` linearly to
            `end_rate` over `duration` seconds, and on with that); `diurnal` (Poisson of rate (1 + amplitude
            sin(2 pi t / period)));
            `trace` (the recorded times of `lengths`, whose order must be file or window);
            `servegen` (the sum of per-client renewal processes whose rate and burstiness change every ten minutes);
            `at_once` (everything at 0, an offline batch);
            `closed_loop` (the next request comes `think_time` seconds after one has ended: load follows the system).
        rate: requests per second on average, for `ramp` at the start. A recorded process is stretched (`trace`) or its
            clients' rates are scaled (`servegen`) to it, and stays as it is without.
        cv: of the gaps.
        on, off: seconds.
        end_rate, duration: of the ramp: requests per second, seconds.
        amplitude, period: of the day: share of the rate up to 1, seconds.
        clients: ServeGen's files of clients, `chunk-N-trace.csv`.
        start: seconds into ServeGen's fourteen days.
        concurrency: requests in the system at any time.
        think_time: seconds.
    """

    process: Literal[
        "poisson", "gamma", "constant", "on_off", "ramp", "diurnal", "trace", "servegen", "at_once", "closed_loop"
    ] = "poisson"
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cv: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    on: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    off: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    end_rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    duration: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    amplitude: float | None = Field(default=None, ge=0, le=1)
    period: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    clients: tuple[str, ...] | None = Field(default=None, min_length=1)
    start: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    concurrency: int | None = Field(default=None, ge=1)
    think_time: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _complete(self) -> ArrivalSettings:
        needs, may_have = _NEEDS[self.process], _MAY_HAVE.get(self.process, ())
        for name in type(self).model_fields:
            given = name != "process" and getattr(self, name) is not None
            if name in needs and not given:
                raise ValueError(f"process {self.process!r} needs a {name}")
            if given and name not in needs + may_have:
                raise ValueError(f"process {self.process!r} takes no {name}")
        return self

    @property
    def is_closed(self) -> bool:
        return self.process == "closed_loop"


class ArrivalTimes(NamedTuple):
    """Ascending seconds, and who sends each where the process tells; else None."""

    times: list[float]
    clients: list[str] | None = None


def arrival_times(
    settings: ArrivalSettings,
    count: int,
    rng: np.random.Generator,
    samples: Sequence[Sample] = (),
    tick: float = 0.0,
) -> ArrivalTimes:
    """`count` arrivals, the first gap counted from 0. Another rate stretches the same pattern.

    Args:
        settings: the process; of a closed loop, only the first `concurrency` requests come at these times.
        rng: the stream for arrivals.
        samples, tick: of the source of lengths, for the process `trace`.

    Raises:
        WorkloadError: recorded times are missing or too few.
    """
    rate = settings.rate
    if settings.process in ("at_once", "closed_loop"):
        return ArrivalTimes([0.0] * count)
    if settings.process == "trace":
        return ArrivalTimes(_recorded(rate, samples[:count], tick, rng))
    if settings.process == "servegen":
        files = [existing_file(path) for path in settings.clients or ()]
        return ArrivalTimes(*superpose([read_client(file) for file in files], count, rng, settings.start or 0.0, rate))
    assert rate is not None
    if settings.process == "constant":
        gaps = np.ones(count)
    else:
        shape = 1.0 if settings.cv is None else settings.cv**-2
        gaps = rng.gamma(shape, 1.0 / shape, count)
    times: list[float] = _when(settings, rate, np.cumsum(gaps)).tolist()
    return ArrivalTimes(times)


def _when(settings: ArrivalSettings, rate: float, expected: Floats) -> Floats:
    """The times by which `expected` requests are expected: the inverse of the integrated rate (time rescaling)."""
    if settings.process == "on_off":
        on, off = settings.on or 0.0, settings.off or 0.0
        busy = expected / (rate * (on + off) / on)  # seconds of `on` gone by; all requests of a cycle fall into them
        cycles = np.floor(busy / on)
        return cycles * (on + off) + (busy - cycles * on)
    if settings.process == "ramp":
        end, duration = settings.end_rate or 0.0, settings.duration or 0.0
        slope, on_ramp = (end - rate) / duration, duration * (rate + end) / 2
        rising = (
            expected / rate if slope == 0 else (np.sqrt(np.maximum(rate**2 + 2 * slope * expected, 0)) - rate) / slope
        )
        return np.where(expected <= on_ramp, rising, duration + (expected - on_ramp) / end)
    if settings.process == "diurnal":
        return _diurnal(rate, settings.amplitude or 0.0, settings.period or 1.0, expected)
    return expected / rate


def _diurnal(rate: float, amplitude: float, period: float, expected: Floats) -> Floats:
    """Halves the interval: the integral rate (t + amplitude period / 2 pi (1 - cos(2 pi t / period))) never falls."""
    swing = amplitude * period / (2 * math.pi)
    low = np.maximum(0.0, expected / rate - 2 * swing)
    high = expected / rate
    for _ in range(60):
        middle = (low + high) / 2
        early = rate * (middle + swing * (1 - np.cos(2 * math.pi * middle / period))) < expected
        low, high = np.where(early, middle, low), np.where(early, high, middle)
    return high


def _recorded(rate: float | None, samples: Sequence[Sample], tick: float, rng: np.random.Generator) -> list[float]:
    recorded = [sample.time for sample in samples if sample.time is not None]
    if len(recorded) < len(samples) or not recorded:
        raise WorkloadError("arrivals: {process: trace}: the source of lengths has no times (of a file: time_column)")
    times = np.array(recorded, dtype=np.float64)
    if np.any(np.diff(times) < 0):
        at = int(np.argmax(np.diff(times) < 0)) + 2
        raise WorkloadError(f"arrivals: {{process: trace}}: the recorded times must ascend, and record {at} is earlier")
    times -= times[0]
    if tick:
        times = np.sort(times + rng.uniform(0.0, tick, len(times)))
        times -= times[0]
    if rate is not None:
        if times[-1] <= 0:
            raise WorkloadError("arrivals: {process: trace}: all recorded times are alike; no rate can be had of them")
        times *= (len(times) - 1) / times[-1] / rate
    out: list[float] = times.tolist()
    return out
