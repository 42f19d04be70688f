"""`research-engine compare RUN_A RUN_B`: what differs in configuration, environment and result, and what is real."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from experiments.analysis.cells import CellResults
from experiments.analysis.environments import flat
from experiments.analysis.metrics import METRICS
from experiments.analysis.run_files import RunFiles
from experiments.analysis.statistics import ENOUGH_SEEDS, Change, paired_change
from experiments.config import ConfigError
from experiments.settings import nearest_first

if TYPE_CHECKING:
    from rich.table import Table

_VERDICTS = {"real": "real", "not shown": "not shown", "too few seeds": "open", "none": "equal", "unknown": "-"}
_LEGEND = {
    "not shown": "not shown: not shown to differ",
    "open": f"open: not decided, there are fewer than {ENOUGH_SEEDS} seeds",
    "*": "*: not the same requests",
}


@dataclass(frozen=True)
class Difference:
    """One metric of one cell that both runs have.

    Attributes:
        cell: its label.
        metric: name out of METRICS.
        before, after: means over the seeds that both have.
        change: paired, from A to B.
        is_paired: whether both runs served the same requests under each of those seeds.
    """

    cell: str
    metric: str
    before: float
    after: float
    change: Change
    is_paired: bool


@dataclass(frozen=True)
class Comparison:
    """What two runs differ in.

    Attributes:
        configuration, environment: key -> (in A, in B); None where a run lacks it.
        differences: of every cell that both have.
        only: cells of A alone, cells of B alone.
    """

    configuration: Mapping[str, tuple[Any, Any]]
    environment: Mapping[str, tuple[Any, Any]]
    differences: Sequence[Difference]
    only: tuple[Sequence[str], Sequence[str]]


def main(
    run_a: Annotated[Path, tyro.conf.Positional],
    run_b: Annotated[Path, tyro.conf.Positional],
    metric: tuple[str, ...] = (),
    json_output: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Compare two run directories.

    A difference of results is real when the 95 % BCa interval of the differences, paired by seed, excludes 0 and an
    exact sign-flip test gives p < 0.05; that takes at least six seeds.

    Args:
        run_a: the run that is compared with.
        run_b: the other one.
        metric: which metrics; those that both runs have and that are better high or low, if none is given.
        json_output: print JSON in place of tables.
    """
    for name in metric:
        if name not in METRICS:
            raise ValueError(f"no metric {name!r}; {nearest_first(name, METRICS)}")
    found = compare(RunFiles.of(run_a), RunFiles.of(run_b), metric)
    if json_output:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _print(found, run_a, run_b)
    return 0


def compare(a: RunFiles, b: RunFiles, names: Sequence[str] = ()) -> Comparison:
    """Compare two runs; a single cell each is compared whatever their labels.

    Args:
        a, b: the runs.
        names: out of METRICS; all that are better high or low when empty.

    Raises:
        ConfigError: the runs have no cell in common.
    """
    cells_a, cells_b = ({cell.label: cell for cell in run.cells if cell.summaries} for run in (a, b))
    common = [(label, cells_a[label], cells_b[label]) for label in cells_a if label in cells_b]
    if not common and len(cells_a) == len(cells_b) == 1:
        (one,), (other,) = cells_a.values(), cells_b.values()
        common = [(f"{one.label} -> {other.label}", one, other)]
    if not common:
        raise ConfigError(f"no cell in common: {a.directory} has {', '.join(cells_a) or 'no finished trial'}; "
                          f"{b.directory} has {', '.join(cells_b) or 'no finished trial'}")  # fmt: skip
    wanted = names or [name for name, metric in METRICS.items() if metric.better is not None]
    differences = [d for label, one, other in common for name in wanted if (d := _difference(label, name, one, other))]
    compared = {label for _, one, other in common for label in (one.label, other.label)}
    only = tuple([label for label in cells if label not in compared] for cells in (cells_a, cells_b))
    configs = [{k: v for k, v in run.config.items() if k != "description"} for run in (a, b)]
    configuration, environment = _differing(*map(flat, configs)), _differing(a.facts, b.facts)
    return Comparison(configuration, environment, differences, (only[0], only[1]))


def _difference(label: str, name: str, one: CellResults, other: CellResults) -> Difference | None:
    before, after = (cell.values(METRICS[name]) for cell in (one, other))
    change = paired_change(after, before)
    if not change.seeds:
        return None
    seeds = [seed for seed in after if seed in before and after[seed] == after[seed] and before[seed] == before[seed]]
    digests = [
        {seed: s.get("workload", {}).get("digest") for (seed, _), s in cell.summaries.items()} for cell in (one, other)
    ]
    is_paired = all(digests[0][seed] == digests[1][seed] for seed in seeds)
    means = [sum(values[seed] for seed in seeds) / len(seeds) for values in (before, after)]
    return Difference(label, name, means[0], means[1], change, is_paired)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*a, *(key for key in b if key not in a)]
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _digits(d: Difference, least: int) -> int:
    """After the point: the metric's own, or as many as give the smaller of the two three that count, up to nine: with
    fewer, 0.0124 and 0.0161 look like 0.01 and 0.02 beside a change of 30 %.
    """
    sizes = [abs(value) for value in (d.before, d.after) if value and math.isfinite(value)]
    return max([least, *(min(9, 2 - math.floor(math.log10(size))) for size in sizes)])


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "configuration": {key: list(pair) for key, pair in found.configuration.items()},
        "environment": {key: list(pair) for key, pair in found.environment.items()},
        "only_in_a": list(found.only[0]),
        "only_in_b": list(found.only[1]),
        "results": [
            {"cell": d.cell, "metric": d.metric, "a": d.before, "b": d.after, "change_percent": _json(d.change.percent),
             "difference": _json(d.change.difference), "p": _number(d.change.p), "seeds": d.change.seeds,
             "verdict": d.change.verdict, "same_requests": d.is_paired}
            for d in found.differences
        ],
    }  # fmt: skip


def _json(interval: Sequence[float]) -> list[float | None]:
    return [_number(value) for value in interval]


def _number(value: float) -> float | None:
    return value if value == value else None


def _print(found: Comparison, run_a: Path, run_b: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for name, run in (("A", run_a), ("B", run_b)):
        console.print(f"{name}: {run}", markup=False, soft_wrap=True)
    for title, pairs in (("configuration", found.configuration), ("environment", found.environment)):
        if not pairs:
            console.print(f"{title}: no difference")
            continue
        table = Table("", "A", "B", title=title, title_justify="left")
        for key, (one, other) in pairs.items():
            table.add_row(Text(key), *(Text("-" if value is None else str(value)) for value in (one, other)))
        console.print(table)
    for cell in dict.fromkeys(d.cell for d in found.differences):
        console.print(_results_of([d for d in found.differences if d.cell == cell]))
        console.print()
    shown = {_verdict(d) for d in found.differences}
    for line in (line for word, line in _LEGEND.items() if any(word in verdict for verdict in shown)):
        console.print(line, markup=False)
    for name, labels in zip("AB", found.only, strict=True):
        if labels:
            console.print(f"only in {name}: {', '.join(labels)}", markup=False)


def _results_of(differences: Sequence[Difference]) -> Table:
    """One cell's metrics; 80 columns hold them, for a metric's name breaks between its words."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    title = Text(differences[0].cell)
    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, title=title, title_justify="left")
    table.add_column("metric")
    for name in ("A", "B", "change\n%", "95 % interval\nof the change", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for d in differences:
        metric, percent = METRICS[d.metric], d.change.percent
        known = percent.mean == percent.mean
        spread = f"{percent.low:+.1f} to {percent.high:+.1f}" if percent.low == percent.low else "-"
        p = f"{d.change.p:.3f}" if d.change.p == d.change.p else "-"
        digits = _digits(d, metric.digits)
        table.add_row(Text(metric.label), f"{d.before:.{digits}f}", f"{d.after:.{digits}f}",
                      f"{percent.mean:+.1f}" if known else "-", spread, p, _verdict(d))  # fmt: skip
    return table


def _verdict(d: Difference) -> str:
    return _VERDICTS[d.change.verdict] + ("" if d.is_paired else " *")
