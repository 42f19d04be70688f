"""Lengths that are drawn, not read: fixed, uniform, Zipf, log-normal, and the shipped statistics of public traces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field, field_validator

from experiments.settings import Settings
from experiments.workloads.fits import FitName, shipped_fits
from experiments.workloads.samples import (
    TRIES,
    Bounds,
    Encoder,
    Lengths,
    Sample,
    UsualBounds,
    WorkloadError,
    first_kept,
)

_DRAWS_FOR_FACTORS, _STEPS_TO_FACTORS = 20_000, 200


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
        means: of prompts and outputs, in tokens, for a workload of which no more is published: all prompts are
            multiplied by one factor, all outputs by another, so that those within the bounds have these means. None
            multiplies by nothing.
    """

    source: Literal["fitted"]
    trace: FitName
    means: tuple[float, float] | None = None

    @field_validator("means")
    @classmethod
    def _of_tokens(cls, means: tuple[float, float] | None) -> tuple[float, float] | None:
        if means is not None and not all(1 <= mean < math.inf for mean in means):
            raise ValueError(f"{list(means)} must be two numbers of tokens >= 1: of prompts and of outputs")
        return means

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        fit, factors = shipped_fits()[self.trace], self.factors()

        def draws() -> Iterator[Sample]:
            for _ in range(TRIES):
                yield from map(Sample, *self._scaled(fit.draw(count, rng), factors))

        origin = f"statistics of {fit.name}, random tokens"
        if self.means is not None:
            origin += f", prompts times {factors[0]:.2f}, outputs times {factors[1]:.2f}"
        return Lengths(first_kept(draws(), self.keeps, count, self.trace), origin)

    def factors(self) -> tuple[float, float]:
        """Of prompts and of outputs, found on draws of their own, the same for every seed.

        Raises:
            WorkloadError: no factors give these means within the bounds.
        """
        if self.means is None:
            return 1.0, 1.0
        drawn = shipped_fits()[self.trace].draw(_DRAWS_FOR_FACTORS, np.random.default_rng(0))
        factors, found = (1.0, 1.0), (math.inf, math.inf)
        for _ in range(_STEPS_TO_FACTORS):
            pairs = zip(*self._scaled(drawn, factors), strict=True)
            kept = np.array([pair for pair in pairs if self.keeps(*pair)], dtype=np.float64)
            if not len(kept):
                break
            found = float(kept[:, 0].mean()), float(kept[:, 1].mean())
            if all(abs(mean / wanted - 1) < 5e-3 for mean, wanted in zip(found, self.means, strict=True)):
                return factors
            factors = factors[0] * self.means[0] / found[0], factors[1] * self.means[1] / found[1]
        rule = f"no factors give them within the bounds; {found[0]:.4g} and {found[1]:.4g} are near"
        raise WorkloadError(f"means = {list(self.means)}: {rule}")

    @staticmethod
    def _scaled(lengths: tuple[list[int], list[int]], factors: tuple[float, float]) -> list[list[int]]:
        return [[max(1, round(n * factor)) for n in own] for own, factor in zip(lengths, factors, strict=True)]
