"""Lengths that are drawn, not read: fixed, uniform, Zipf, log-normal, and the shipped statistics of public traces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from experiments.settings import Settings
from experiments.workloads.fits import FitName, shipped_fits
from experiments.workloads.samples import (
    TRIES,
    Bounds,
    Encoder,
    Lengths,
    Sample,
    UsualBounds,
    first_kept,
)


class FixedLengths(Settings):
    """Every request alike."""

    source: Literal["fixed"]
    prompt: int = Field(ge=1)
    output: int = Field(ge=1)

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        return Lengths([Sample(self.prompt, self.output)] * count, f"fixed, {self.prompt} in, {self.output} out")


def _ascending(bounds: tuple[int, int]) -> tuple[int, int]:
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{list(bounds)} must be [low, high] with 1 <= low <= high")
    return bounds


Range = Annotated[tuple[int, int], AfterValidator(_ascending)]


class UniformLengths(Settings):
    """Independent and uniform between two bounds, both included: prompt: [low, high], output: [low, high]."""

    source: Literal["uniform"]
    prompt: Range
    output: Range

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        prompts, outputs = (rng.integers(low, high, count, endpoint=True) for low, high in (self.prompt, self.output))
        origin = f"uniform, {list(self.prompt)} in, {list(self.output)} out"
        return Lengths(list(map(Sample, prompts.tolist(), outputs.tolist())), origin)


class ZipfLengths(Settings):
    """Independent, between two bounds, both included: the probability of length x is proportional to x^-exponent.

    Args:
        prompt, output: [low, high].
        exponent: 0 is uniform; the larger, the more short ones.
    """

    source: Literal["zipf"]
    prompt: Range
    output: Range
    exponent: float = Field(default=1.1, ge=0, allow_inf_nan=False)

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        prompts, outputs = (self._one(bounds, count, rng) for bounds in (self.prompt, self.output))
        origin = f"Zipf {self.exponent:g}, {list(self.prompt)} in, {list(self.output)} out"
        return Lengths(list(map(Sample, prompts, outputs)), origin)

    def _one(self, bounds: tuple[int, int], count: int, rng: np.random.Generator) -> list[int]:
        values = np.arange(bounds[0], bounds[1] + 1)
        cumulative = np.cumsum(values.astype(np.float64) ** -self.exponent)
        at = np.searchsorted(cumulative, rng.random(count) * cumulative[-1], "right")
        drawn: list[int] = values[np.minimum(at, len(values) - 1)].tolist()
        return drawn


class LogNormalLengths(UsualBounds):
    """Log-normal lengths, by default fitted to ShareGPT.

    With the usual bounds the fit gives prompts of mean / median / P99 215 / 113 / 966 tokens and outputs of 204 / 148 /
    959, where ShareGPT has 236 / 108 / 954 and 217 / 140 / 945.

    Args:
        prompt_log_mean, prompt_log_std, output_log_mean, output_log_std: of the natural logarithms.
        correlation: of the two logarithms.
    """

    source: Literal["lognormal"]
    prompt_log_mean: float = Field(default=5.14, allow_inf_nan=False)
    prompt_log_std: float = Field(default=2.01, ge=0, allow_inf_nan=False)
    output_log_mean: float = Field(default=4.91, allow_inf_nan=False)
    output_log_std: float = Field(default=0.85, ge=0, allow_inf_nan=False)
    correlation: float = Field(default=-0.38, ge=-1, le=1)

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        slope, rest = self.correlation, math.sqrt(1 - self.correlation**2)

        def draws() -> Iterator[Sample]:
            for _ in range(TRIES * count):
                first, second = rng.standard_normal(2).tolist()
                log_prompt = self.prompt_log_mean + self.prompt_log_std * first
                log_output = self.output_log_mean + self.output_log_std * (slope * first + rest * second)
                yield Sample(round(math.exp(min(log_prompt, 40.0))), round(math.exp(min(log_output, 40.0))))

        return Lengths(first_kept(draws(), self.keeps, count, "lognormal"), "log-normal, random tokens")


class FittedLengths(Bounds):
    """The shipped statistics of a public trace: its quantiles and the rank correlation of prompts and outputs.

    Lengths are drawn by a Gaussian copula: two normal variates of the correlation that gives the trace's Spearman rho,
    each turned into a length by the trace's quantile function (logarithmic between the shipped quantiles).

    Args:
        trace: whose.
    """

    source: Literal["fitted"]
    trace: FitName

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        fit = shipped_fits()[self.trace]

        def draws() -> Iterator[Sample]:
            for _ in range(TRIES):
                yield from map(Sample, *fit.draw(count, rng))

        return Lengths(first_kept(draws(), self.keeps, count, self.trace), f"statistics of {fit.name}, random tokens")
