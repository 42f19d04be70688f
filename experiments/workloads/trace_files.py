"""Where trace files lie, their records, and which of them a workload takes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from experiments.settings import nearest_first
from experiments.workloads.fits import FitName, shipped_fits
from experiments.workloads.samples import Bounds, Encoder, Lengths, Sample, WorkloadError, first_kept
from research_engine.datasets.record_file import read_records

TRACES = "RESEARCH_ENGINE_TRACES"  # names the folder; `run.py --traces` sets it
MOST_TOKENS = 100_000_000
"""Of a prompt or an answer; a file with more is damaged, and to draw so many would take all memory there is."""
Row = dict[str, Any]


def traces_folder() -> Path | None:
    """The folder of public traces that the user named, or None."""
    named = os.environ.get(TRACES)
    return Path(named).expanduser() if named else None


def existing_file(path: str) -> Path:
    """The path, expanded, or that of the same name in the traces' folder.

    Raises:
        WorkloadError: no file is there.
    """
    folder = traces_folder()
    places = [Path(path).expanduser(), *([] if folder is None else [folder / path])]
    for place in places:
        if place.is_file():
            return place
    hint = f"; --traces DIR or {TRACES} names a folder to look in" if folder is None else f", nor in {folder}"
    raise WorkloadError(f"no file {path!r}{hint}")


def rows(path: Path) -> Iterator[Row]:
    """Records of a .csv file with a header, or of a .jsonl file.

    Raises:
        WorkloadError: the file has another suffix, cannot be read, or a line of it is no JSON object.
    """
    try:
        yield from read_records(path)
    except ValueError as error:
        raise WorkloadError(str(error)) from error


def field(row: Row, column: str, where: str) -> Any:
    """A record's value; WorkloadError names the columns that there are."""
    if row.get(column) is None:
        raise WorkloadError(f"{where}: no column {column!r}; {nearest_first(column, map(str, row))}")
    return row[column]


def tokens(row: Row, column: str, where: str) -> int:
    """A record's number of tokens."""
    value = field(row, column, where)
    try:
        count = int(float(str(value)))
    except (ValueError, OverflowError):
        count = MOST_TOKENS + 1
    if count > MOST_TOKENS:
        raise WorkloadError(f"{where}: {column} = {value!r} is no number of tokens up to {MOST_TOKENS:,}")
    return count


def seconds(row: Row, column: str, where: str, scale: float = 1.0) -> float:
    """A record's time in seconds: a number times `scale`, or a date with its time of day."""
    value = field(row, column, where)
    time = _seconds(value, scale)
    if not math.isfinite(time):
        raise WorkloadError(f"{where}: {column} = {value!r} is neither a number of seconds nor a date")
    return time


def _seconds(value: Any, scale: float) -> float:
    """NaN for what is neither."""
    try:
        return float(value) * scale
    except (TypeError, ValueError):
        pass
    try:
        with warnings.catch_warnings():  # numpy takes an offset from UTC into account, and says that it is deprecated
            warnings.simplefilter("ignore")
            date = np.datetime64(str(value).strip().replace(" ", "T"), "ns")
    except ValueError:
        return math.nan
    return math.nan if np.isnat(date) else float(date.astype(np.int64)) * 1e-9


class TraceLengths(Bounds):
    """Records of a file: the base of every reader of traces.

    Args:
        path: the file, or its name in the traces' folder. None takes the public file of the source out of that
            folder, and its shipped statistics where the folder is not named or lacks it.
        order: which records: `shuffle` (at random), `file` (from the top; every seed the same ones), `window` (as many
            in a row as are wanted, from a random one on). Only the last two keep the recorded times.
    """

    has_times: ClassVar[bool] = False
    has_clients: ClassVar[bool] = False
    tick: ClassVar[float] = 0.0
    """Seconds to which the file's times are rounded down."""

    path: str | None = None
    order: Literal["shuffle", "file", "window"] = Field(default="shuffle")

    def public_names(self) -> Sequence[str]:
        """Names that the public file goes by."""
        return ()

    def fit_name(self) -> FitName | None:
        """The shipped statistics of the public file."""
        return None

    def title(self) -> str:
        """In words, for the table."""
        raise NotImplementedError

    def read(self, path: Path) -> Iterator[Sample]:
        """The file's samples in its order. Raises WorkloadError."""
        raise NotImplementedError

    def file(self) -> Path | None:
        """The file to read; None where the shipped statistics take its place. Raises WorkloadError."""
        if self.path is not None:
            return existing_file(self.path)
        folder = traces_folder()
        places = [] if folder is None else [folder / name for name in self.public_names()]
        return next((place for place in places if place.is_file()), None)

    def draw(self, count: int, rng: np.random.Generator, tokenizer: Encoder | None) -> Lengths:
        path = self.file()
        return self._statistics(count, rng) if path is None else self._records(path, count, rng)

    def _records(self, path: Path, count: int, rng: np.random.Generator) -> Lengths:
        samples: Sequence[Sample] = list(self.read(path))
        origin = f"{self.title()}, {path.name}"
        if self.order == "shuffle":
            samples = [samples[index] for index in rng.permutation(len(samples)).tolist()]
        elif self.order == "window":
            kept = [sample for sample in samples if self.keeps(sample.prompt_tokens, sample.output_tokens)]
            start = int(rng.integers(0, max(1, len(kept) - count + 1)))
            samples = kept[start:]
        return Lengths(first_kept(samples, self.keeps, count, path.name), origin)

    def _statistics(self, count: int, rng: np.random.Generator) -> Lengths:
        from experiments.workloads.synthetic import FittedLengths

        fit, name = self.fit_name(), " or ".join(self.public_names())
        if fit is None or fit not in shipped_fits() or self.order != "shuffle":
            what = f"order: {self.order}" if fit in shipped_fits() else f"source: {self.title()}"
            raise WorkloadError(f"{what} needs the file {name}: give path, or --traces DIR with a folder that has it")
        drawn = FittedLengths(source="fitted", trace=fit, **self.of_bounds()).draw(count, rng, None)
        why = f"{name} is not there (--traces DIR names its folder); the shipped statistics of it are used"
        return Lengths(drawn.samples, drawn.origin, (why,))
