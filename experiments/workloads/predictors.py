"""Length predictors: what a policy is told of an output's length before it runs; all as good as asked for.

    none      nothing
    oracle    the true length
    noisy     the true length times a log-normal error, or as much noise as gives a wanted Kendall tau-b between true
              and predicted lengths
    classes   as a real classifier errs: predicted classes of a file's rows whose true length is the nearest

SSJF (Qiu et al., 2024) predicts classes with BERT; the file that it publishes has columns output_token_length and
predicted_length and a tau-b of 0.63. Fu et al. (NeurIPS 2024) rank policies' predictors by Kendall's tau.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from experiments.settings import Settings
from experiments.workloads.samples import WorkloadError
from experiments.workloads.trace_files import existing_file, field, rows

TAU_WITHIN = 0.02
Floats = npt.NDArray[np.float64]
_LARGEST = 1e9  # tokens; no prediction is above it
_MOST_CLASSES = 2**31
_NEAREST = 100  # rows at least that a prediction by class is drawn from


class NoPredictor(Settings):
    """Policies are told nothing."""

    kind: Literal["none"] = "none"


class OraclePredictor(Settings):
    """Policies are told the true length."""

    kind: Literal["oracle"]


class NoisyPredictor(Settings):
    """The true length with noise; give one of the two.

    Args:
        log_std: standard deviation of ln(predicted / true), which is normal.
        kendall_tau: wanted tau-b of the workload's true and predicted lengths, met within 0.02. The predictions are
            spread as the true lengths are.
    """

    kind: Literal["noisy"]
    log_std: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    kendall_tau: float | None = Field(default=None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> NoisyPredictor:
        if (self.log_std is None) == (self.kendall_tau is None):
            raise ValueError("give either log_std or kendall_tau")
        return self


class ClassPredictor(Settings):
    """Errors of a real classifier. A predicted class is told as the median true length of its rows in the file.

    Lengths beyond those in the file are taken for its longest.

    Args:
        path: a .csv file.
        length_column, class_column: names of its columns with the true length and the predicted class.
    """

    kind: Literal["classes"]
    path: str
    length_column: str = "output_token_length"
    class_column: str = "predicted_length"


PredictorSettings = Annotated[
    NoPredictor | OraclePredictor | NoisyPredictor | ClassPredictor, Field(discriminator="kind")
]


@dataclass(frozen=True)
class Predictions:
    """One predicted length a request, None from `none`; and what to tell of them.

    Attributes:
        lengths: at least 1.
        kendall_tau: tau-b of true and predicted lengths; None where it isn't defined (no predictions, or all lengths
            alike).
        warnings: what could not be had as asked for.
    """

    lengths: list[int | None]
    kendall_tau: float | None = None
    warnings: tuple[str, ...] = ()


def predict(settings: PredictorSettings, true_lengths: Sequence[int], rng: np.random.Generator) -> Predictions:
    """Predicted lengths of a workload's outputs.

    Args:
        settings: the predictor.
        true_lengths: output tokens of each request, at least 1.
        rng: the stream for predictions.

    Raises:
        WorkloadError: the file is missing or has another shape.
    """
    if isinstance(settings, NoPredictor):
        return Predictions([None] * len(true_lengths))
    true = np.asarray(true_lengths, dtype=np.float64)
    warnings: tuple[str, ...] = ()
    if isinstance(settings, OraclePredictor):
        predicted = true
    elif isinstance(settings, ClassPredictor):
        predicted = _by_class(settings, true, rng)
    else:
        noise = rng.standard_normal(len(true))
        if settings.kendall_tau is not None:
            predicted, warnings = _calibrated(settings.kendall_tau, true, noise)
        else:
            predicted = _whole(np.log(true) + (settings.log_std or 0.0) * noise)
    lengths: list[int | None] = [int(length) for length in predicted.tolist()]
    return Predictions(lengths, kendall_tau(true, predicted), warnings)


def kendall_tau(first: Floats, second: Floats) -> float | None:
    """Kendall's tau-b, in which ties count for neither side; None where one of the two is all alike."""
    from scipy.stats import kendalltau

    if len(first) < 2 or first.min() == first.max() or second.min() == second.max():
        return None
    return float(kendalltau(first, second).statistic)


def _whole(logarithms: Floats) -> Floats:
    lengths: Floats = np.rint(np.exp(np.clip(logarithms, 0, np.log(_LARGEST))))
    return lengths


def _calibrated(wanted: float, true: Floats, noise: Floats) -> tuple[Floats, tuple[str, ...]]:
    """Predictions of the wanted tau-b, and a warning where none come within 0.02.

    Log-lengths turn into noise of the same mean and spread: mean + cos(a) x + sin(a) s z, with x their distance from
    the mean and s its standard deviation. Their order is that of x + tan(a) s z, so with fixed z every pair of requests
    changes its order at most once while the angle goes from 0 to pi; tau falls from 1 to -1 (but for rounding to whole
    tokens), and halving an interval finds the angle.
    """
    if kendall_tau(true, true) is None:
        return true, ("the output lengths are all alike, so predictions of them have no Kendall tau; they are exact",)
    logarithms = np.log(true)
    mean, spread = logarithms.mean(), logarithms.std()

    def at(angle: float) -> Floats:
        return _whole(mean + np.cos(angle) * (logarithms - mean) + np.sin(angle) * spread * noise)

    def tau(angle: float) -> float:
        return kendall_tau(true, at(angle)) or 0.0

    low, high = 0.0, np.pi
    for _ in range(30):
        middle = (low + high) / 2
        if tau(middle) > wanted:
            low = middle
        else:
            high = middle
    best = min((low, high), key=lambda angle: abs(tau(angle) - wanted))
    got = tau(best)
    if abs(got - wanted) <= TAU_WITHIN:
        return at(best), ()
    why = f"of {len(true)} requests no noise gives Kendall tau {wanted:g}; the nearest, {got:.3f}, is used"
    return at(best), (why,)


def _by_class(settings: ClassPredictor, true: Floats, rng: np.random.Generator) -> Floats:
    lengths, classes = _read(settings)
    order = np.argsort(lengths, kind="stable")
    lengths, classes = lengths[order], classes[order]
    told = {number: float(np.median(lengths[classes == number])) for number in np.unique(classes).tolist()}
    known = np.clip(true, lengths[0], lengths[-1])
    low, high = np.searchsorted(lengths, known, "left"), np.searchsorted(lengths, known, "right")
    missing = np.maximum(0, _NEAREST - (high - low))  # too few rows of that very length: take those around it as well
    low = np.maximum(0, low - (missing + 1) // 2)
    high = np.minimum(len(lengths), high + (missing + 1) // 2)
    picked = rng.integers(low, high)
    return np.maximum(1, np.rint(np.array([told[number] for number in classes[picked].tolist()])))


def _read(settings: ClassPredictor) -> tuple[Floats, npt.NDArray[np.int64]]:
    path = existing_file(settings.path)
    columns = (settings.length_column, settings.class_column)
    lengths, classes = [], []
    for index, row in enumerate(rows(path), 1):
        where = f"{path.name}, record {index}"
        given = [field(row, column, where) for column in columns]
        try:
            length, number = float(given[0]), int(float(given[1]))
        except (TypeError, ValueError, OverflowError):
            length, number = math.nan, 0
        if not math.isfinite(length) or abs(number) > _MOST_CLASSES:
            values = ", ".join(f"{column} = {value!r}" for column, value in zip(columns, given, strict=True))
            raise WorkloadError(f"{where}: {values}: must be numbers")
        lengths.append(length)
        classes.append(number)
    if not lengths:
        raise WorkloadError(f"{path.name}: it has no records")
    return np.array(lengths), np.array(classes, dtype=np.int64)
