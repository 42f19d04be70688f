"""`research-engine bench compare`: results of `bench serve` against each other, the first being the baseline.

A file may hold several runs, one a line (--append-result): their mean is compared, and with two or more on both sides
the change has a 95 % interval (Welch's t, over runs: requests of one run depend on each other through the queue).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

_RATES = ("request_throughput", "request_goodput", "slo_attainment", "output_throughput", "total_token_throughput")
_COUNTS = ("completed", "failed", "unfinished")
# What must be the same for two results to be of the same load.
_LOAD = ("backend", "num_prompts", "request_rate", "burstiness", "max_concurrency", "dataset", "tokenizer_id")
_SKIPPED = {"created", "started", "date", "id", "port"}  # of what a server says: differ between any two starts


class Change(NamedTuple):
    """Of a metric against the baseline, in percent; NaN bounds where there are too few runs for an interval."""

    percent: float
    low: float
    high: float


def main(
    files: Annotated[tuple[Path, ...], tyro.conf.Positional],
) -> int:
    """Compare results of bench serve: what changed, whether the loads were the same, how the servers differ.

    Args:
        files: two or more JSON files, the baseline first.
    """
    if len(files) < 2:
        raise ValueError(f"{len(files)} files: needs two or more, the baseline first")
    if len({path.resolve() for path in files}) < len(files):
        raise ValueError("a file is given twice")
    sides = {_name(path, files): read_results(path) for path in files}
    console = Console()
    console.print(comparison_table(sides))
    for line in remarks(sides):
        print(line)
    return 0


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs of a file: one JSON object a line, or the runs of a sweep.

    Raises:
        ValueError: the file cannot be read, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        runs = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        try:
            runs = [json.loads(text)]  # one object over many lines, as other tools write it
        except ValueError as error:
            raise ValueError(f"{path}: is no result of bench serve: {error}") from None
    if len(runs) == 1 and isinstance(runs[0], dict) and "saturation" in runs[0]:
        raise ValueError(f"{path}: is a sweep; compare single rates, or look at the .md files beside the sweeps")
    for run in runs:
        if not isinstance(run, dict) or "request_throughput" not in run:
            raise ValueError(f"{path}: is no result of bench serve: it has no request_throughput")
    if not runs:
        raise ValueError(f"{path}: is empty")
    return runs


def comparison_table(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row a metric that every side has; changes in percent of the first side's mean."""
    table = Table(box=SIMPLE)
    names = list(sides)
    table.add_column("metric")
    for name in names:
        runs = len(sides[name])
        table.add_column(f"{name}{f' (mean of {runs})' if runs > 1 else ''}", justify="right")
        if name != names[0]:
            table.add_column("change", justify="right")
    for metric in _metrics(sides.values()):
        cells = []
        for name in names:
            values = values_of(sides[name], metric)
            cells.append(_number(float(np.mean(values))) if values else "-")
            if name != names[0]:
                change = change_of(values_of(sides[names[0]], metric), values)
                cells.append(_percent(change))
        table.add_row(metric, *cells)
    return table


def values_of(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """One a run, where it is a number."""
    values = [run.get(metric) for run in runs]
    return [float(value) for value in values if isinstance(value, (int, float)) and math.isfinite(value)]


def change_of(baseline: Sequence[float], values: Sequence[float]) -> Change:
    """Change of the mean against the baseline's, with Welch's 95 % interval where both sides have two values or more.

    The baseline's mean is taken as exact in the percentage, so the interval is of the difference.
    """
    if not baseline or not values or not float(np.mean(baseline)):
        return Change(math.nan, math.nan, math.nan)
    reference = float(np.mean(baseline))
    difference = float(np.mean(values)) - reference
    if len(baseline) < 2 or len(values) < 2:
        return Change(100 * difference / reference, math.nan, math.nan)
    from scipy import stats

    parts = [float(np.var(side, ddof=1)) / len(side) for side in (baseline, values)]
    if not sum(parts):
        return Change(*[100 * difference / reference] * 3)
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (baseline, values), strict=True)
    )
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(parts))
    bounds = sorted((100 * (difference - half) / reference, 100 * (difference + half) / reference))
    return Change(100 * difference / reference, *bounds)


def remarks(sides: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Whether the loads were the same, whether each run may be believed, and how the servers differ."""
    lines = []
    baseline, *others = sides
    first = sides[baseline][0]
    for name in others:
        other = sides[name][0]
        lines += [
            f"NOT THE SAME LOAD: {key} is {first.get(key)} in {baseline}, {other.get(key)} in {name}"
            for key in _LOAD
            if first.get(key) != other.get(key)
        ]
        seeds = [sorted(str(run.get("seed")) for run in sides[side]) for side in (baseline, name)]
        if seeds[0] != seeds[1]:
            lines.append(f"other arrivals: seeds {', '.join(seeds[0])} in {baseline}, {', '.join(seeds[1])} in {name}")
        for key, left, right in server_differences(first.get("server") or {}, other.get("server") or {}):
            lines.append(f"server: {key} is {left} in {baseline}, {right} in {name}")
    for name, runs in sides.items():
        for word in ("void", "unstable", "interrupted"):
            count = sum(bool(run.get(word)) for run in runs)
            if count:
                lines.append(f"{word.upper()}: {count} of {len(runs)} runs of {name}")
    return lines


def server_differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings in which two servers' descriptions differ: (dotted name, left, right); counters are none."""
    sides = [_flat({key: value for key, value in side.items() if key != "counters"}) for side in (left, right)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return [
        (name, sides[0].get(name), sides[1].get(name)) for name in names if sides[0].get(name) != sides[1].get(name)
    ]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {name: value}
    out: dict[str, Any] = {}
    for key, inner in items:
        if str(key) not in _SKIPPED:
            out |= _flat(inner, f"{name}.{key}" if name else str(key))
    return out


def _metrics(sides: Sequence[Sequence[Mapping[str, Any]]] | Any) -> list[str]:
    every = [run for runs in sides for run in runs]
    latencies = [key for key in every[0] if key.endswith("_ms") and isinstance(every[0][key], (int, float))]
    keys = [*_COUNTS, *_RATES, *latencies]
    return [key for key in keys if any(isinstance(run.get(key), (int, float)) for run in every)]


def _name(path: Path, files: Sequence[Path]) -> str:
    """As short as tells it from the others."""
    stem = path.stem
    return stem if sum(other.stem == stem for other in files) == 1 else str(path)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


def _percent(change: Change) -> str:
    if math.isnan(change.percent):
        return "-"
    if math.isnan(change.low):
        return f"{change.percent:+.1f} %"
    return f"{change.percent:+.1f} % [{change.low:+.1f}, {change.high:+.1f}]"
