"""Plots with a point or a tile for each cell: latency against load, TTFT against throughput, heat map, bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analysis.cells import CellResults
from experiments.analysis.metrics import METRICS, Metric
from experiments.analysis.plots import STYLES, drawing, legend_below, line_style, marker, save
from experiments.analysis.statistics import Interval, bootstrap_interval
from experiments.analysis.tables import digits_of

OF_PARETO = ("output_throughput", "ttft_p50")


def interval_of(cell: CellResults, metric: Metric) -> Interval:
    """Mean over seeds and its interval."""
    return bootstrap_interval(list(cell.values(metric).values()))


def numeric_factors(cells: Sequence[CellResults]) -> list[str]:
    """Factors of at least two levels whose labels are all numbers, in the order of the experiment."""
    factors = list(dict.fromkeys(factor for cell in cells for factor in cell.levels))
    out = []
    for factor in factors:
        labels = {cell.levels.get(factor, "") for cell in cells}
        if len(labels) > 1 and all(_number(label) is not None for label in labels):
            out.append(factor)
    return out


def latency_load(cells: Sequence[CellResults], x: str, names: Sequence[str], title: str, path: Path) -> list[Path]:
    """Metrics against a factor of numbers, a line for each combination of the other factors; bars are 95 % intervals.

    Args:
        cells: of the experiment.
        x: the factor.
        names: out of METRICS, a panel each.
        title: one line on top.
        path: without suffix.
    """
    with drawing(title, 2.7) as figure:
        axes = figure.subplots(1, len(names), squeeze=False)[0]
        for axis, name in zip(axes, names, strict=True):
            metric = METRICS[name]
            for index, (label, line) in enumerate(_lines(cells, x).items()):
                color, style = line_style(index)
                points = [(float(cell.levels[x]), interval_of(cell, metric)) for cell in line]
                known = [(at, interval) for at, interval in points if not math.isnan(interval.mean)]
                ends = [(0.0 if math.isnan(i.low) else i.mean - i.low, 0.0 if math.isnan(i.high) else i.high - i.mean)
                        for _, i in known]  # fmt: skip
                errors = np.maximum(0.0, np.array(ends).T) if known else None
                axis.errorbar(
                    [at for at, _ in known], [i.mean for _, i in known], yerr=errors, color=color, linestyle=style,
                    marker=marker(index), markersize=3.5, linewidth=1.3, elinewidth=0.8, capsize=2, label=label or None,
                )  # fmt: skip
            axis.set(xlabel=x, ylabel=metric.label)
            _spread(axis, sorted({float(cell.levels[x]) for cell in cells if x in cell.levels}))
            _grow(axis, [interval_of(cell, metric).mean for cell in cells])
        legend_below(figure, axes[0])
        return save(figure, path)


def _lines(cells: Sequence[CellResults], x: str) -> dict[str, list[CellResults]]:
    """Other levels -> the cells along x."""
    out: dict[str, list[CellResults]] = {}
    for cell in cells:
        if x in cell.levels:
            out.setdefault(", ".join(v for k, v in cell.levels.items() if k != x), []).append(cell)
    return {label: sorted(line, key=lambda cell: float(cell.levels[x])) for label, line in out.items()}


def _grow(axis: Any, values: Sequence[float]) -> None:
    """Logarithmic upwards where the values spread over more than a factor of 20; from 0 to above all otherwise."""
    positive = [value for value in values if value > 0]
    if positive and max(positive) > 20 * min(positive):
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
    else:
        top = float(axis.dataLim.ymax)
        axis.set_ylim(0, 1.06 * top if 0 < top < math.inf else None)


def _spread(axis: Any, levels: Sequence[float]) -> None:
    """Logarithmic sideways, a tick a level, where positive levels spread over a factor of 8 and more."""
    if levels and 0 < 8 * levels[0] <= levels[-1]:
        axis.set_xscale("log")
        axis.set_xticks(levels, [f"{level:g}" for level in levels])
        axis.set_xticks([], minor=True)


def pareto(cells: Sequence[CellResults], title: str, path: Path) -> list[Path]:
    """TTFT against output throughput, a point a cell; the line joins the cells that no other beats in both."""
    throughput, latency = (METRICS[name] for name in OF_PARETO)
    points = {cell.label: (interval_of(cell, throughput).mean, interval_of(cell, latency).mean) for cell in cells}
    known = {label: point for label, point in points.items() if not any(map(math.isnan, point))}
    with drawing(title, 3.0) as figure:
        axis = figure.subplots()
        front = sorted(point for point in known.values() if not _is_beaten(point, list(known.values())))
        axis.plot(*zip(*front, strict=True), color="0.6", linewidth=1.0, zorder=0, label="not beaten in both")
        for index, (label, point) in enumerate(known.items()):
            axis.plot(
                *point, color=line_style(index)[0], marker=marker(index), markersize=5, linestyle="none", label=label
            )
        axis.set(xlabel=throughput.label, ylabel=latency.label)
        _grow(axis, [point[1] for point in known.values()])
        legend_below(figure, axis)
        return save(figure, path)


def _is_beaten(point: tuple[float, float], others: Sequence[tuple[float, float]]) -> bool:
    """Whether another has at least the throughput and at most the latency, and one of them better."""
    return any(o != point and o[0] >= point[0] and o[1] <= point[1] for o in others)


def heatmap(cells: Sequence[CellResults], x: str, y: str, name: str, title: str, path: Path) -> list[Path]:
    """A metric over two factors, each tile with its number; cells that share both levels are averaged."""
    metric = METRICS[name]
    digits = digits_of(metric, cells)
    columns, rows = (list(dict.fromkeys(cell.levels[f] for cell in cells)) for f in (x, y))
    tiles = np.full((len(rows), len(columns)), np.nan)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            means = [
                interval_of(cell, metric).mean for cell in cells if (cell.levels[y], cell.levels[x]) == (row, column)
            ]
            tiles[i, j] = np.mean(means) if means else np.nan
    with drawing(title, min(8.0, 1.3 + 0.34 * len(rows))) as figure:
        axis = figure.subplots()
        image = axis.imshow(tiles, cmap="cividis", aspect="auto")
        axis.set(xlabel=x, ylabel=y, xticks=range(len(columns)), yticks=range(len(rows)))
        axis.set_xticklabels(columns)
        axis.set_yticklabels(rows)
        for side in axis.spines.values():
            side.set_visible(False)
        low, high = (np.nanmin(tiles), np.nanmax(tiles)) if np.isfinite(tiles).any() else (0.0, 0.0)
        for i, j in np.ndindex(tiles.shape):
            dark = tiles[i, j] < (low + high) / 2
            text = "-" if np.isnan(tiles[i, j]) else f"{tiles[i, j]:.{digits}f}"
            axis.text(j, i, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        figure.colorbar(image, ax=axis, label=metric.label)
        return save(figure, path)


def bars(cells: Sequence[CellResults], name: str, title: str, path: Path) -> list[Path]:
    """A metric for each cell, top to bottom, with 95 % intervals."""
    metric = METRICS[name]
    intervals = [interval_of(cell, metric) for cell in cells]
    with drawing(title, 0.9 + 0.19 * len(cells)) as figure:
        axis = figure.subplots()
        ends = [
            [max(0.0, b) if not math.isnan(b) else 0.0 for b in (i.mean - i.low, i.high - i.mean)] for i in intervals
        ]
        axis.barh([cell.label for cell in cells], [i.mean for i in intervals], xerr=np.array(ends).T,
                  color=STYLES[0][0], height=0.65,
                  error_kw={"elinewidth": 0.9, "capsize": 2, "ecolor": "black"})  # fmt: skip
        axis.invert_yaxis()
        axis.set(xlabel=metric.label, xlim=(0, None))
        return save(figure, path)


def _number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
