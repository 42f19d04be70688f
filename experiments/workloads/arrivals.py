"""When requests arrive: open loop, computed beforehand, in seconds after the start."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field, model_validator

from experiments.settings import Settings


class ArrivalSettings(Settings):
    """An arrival process.

    Args:
        process: `poisson`; `gamma` (renewal process whose gaps have the coefficient of variation `cv`: above 1 bursty);
            `constant` (equal gaps); `at_once` (everything at 0, an offline batch).
        rate: requests per second on average; not for `at_once`.
        cv: for `gamma` alone.
    """

    process: Literal["poisson", "gamma", "constant", "at_once"] = "poisson"
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cv: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _complete(self) -> ArrivalSettings:
        if (self.process == "at_once") != (self.rate is None):
            raise ValueError(f"process {self.process!r} {'takes no' if self.process == 'at_once' else 'needs a'} rate")
        if (self.process == "gamma") != (self.cv is not None):
            raise ValueError(f"process {self.process!r} {'needs a' if self.process == 'gamma' else 'takes no'} cv")
        return self


def arrival_times(settings: ArrivalSettings, count: int, rng: np.random.Generator) -> list[float]:
    """`count` ascending times in seconds, the first gap counted from 0. Another rate stretches the same pattern."""
    if settings.process == "at_once" or settings.rate is None:
        return [0.0] * count
    if settings.process == "constant":
        gaps = np.ones(count)
    else:
        shape = 1.0 if settings.cv is None else settings.cv**-2
        gaps = rng.gamma(shape, 1.0 / shape, count)
    times: list[float] = (np.cumsum(gaps) / settings.rate).tolist()
    return times
