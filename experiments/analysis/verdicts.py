"""What the tables say of differences from the baseline, in a line for each metric that a plot shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from experiments.analysis.cells import CellResults, baseline_of, change_of
from experiments.analysis.metrics import METRICS
from experiments.analysis.statistics import ENOUGH_SEEDS, Change

MOST_CELLS = 3  # told one by one; of more, how many differ
_POINTS = ("p99", "p90", "p50", "mean")
_WORDS = {"not shown": "not shown to differ", "none": "no difference",
          "too few seeds": f"not decided, fewer than {ENOUGH_SEEDS} seeds"}  # fmt: skip
Compared = Sequence[tuple[CellResults, CellResults, Change]]


def verdict_lines(cells: Sequence[CellResults], baseline: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """`TTFT P99 against fcfs: sjf -12 % (95 % CI -15 to -9)`, a line a metric.

    Args:
        cells: of the experiment.
        baseline: factor -> label; nothing is said without one.
        names: out of METRICS; those of which no cell can be compared are left out.
    """
    compared = {name: found for name in dict.fromkeys(names) if (found := _compared(cells, baseline, name))}
    changes = [change for found in compared.values() for _, _, change in found]
    if changes and all(change.verdict == "too few seeds" for change in changes):
        others = [other for found in compared.values() for _, other, _ in found]
        return [f"Nothing is decided {_against(others)}: fewer than {ENOUGH_SEEDS} seeds"]
    return [_line(name, found) for name, found in compared.items()]


def tail_metrics(
    latencies: Sequence[str], shown: Sequence[str], cells: Sequence[CellResults], baseline: Mapping[str, str]
) -> list[str]:
    """Of each latency the metric farthest out in its tail that a table shows and that cells can be compared by.

    Args:
        latencies: such as `ttft`.
        shown: names of the table's metrics.
        cells, baseline: as `verdict_lines` takes them.
    """
    out = []
    for latency in latencies:
        names = [f"{latency}_{point}" for point in _POINTS if f"{latency}_{point}" in shown]
        out += [name for name in names if _compared(cells, baseline, name)][:1]
    return out


def _compared(cells: Sequence[CellResults], baseline: Mapping[str, str], name: str) -> Compared:
    """(cell, what it is compared with, change) of every cell of which a change is known."""
    pairs = [(cell, baseline_of(cell, cells, baseline)) for cell in cells]
    found = [(cell, other, change_of(cell, other, METRICS[name])) for cell, other in pairs if other is not None]
    return [(cell, other, change) for cell, other, change in found if change.verdict != "unknown"]


def _line(name: str, compared: Compared) -> str:
    title = f"{_title(name)} {_against([other for _, other, _ in compared])}"
    if len(compared) > MOST_CELLS:
        real = sum(change.verdict == "real" for _, _, change in compared)
        return f"{title}: {real} of {len(compared)} shown to differ"
    return f"{title}: {'; '.join(f'{cell.label} {_words(change)}' for cell, _, change in compared)}"


def _against(others: Sequence[CellResults]) -> str:
    labels = {other.label for other in others}
    return f"against {labels.pop()}" if len(labels) == 1 else "against the baseline"


def _words(change: Change) -> str:
    """Of one cell; a change that is shown with its size."""
    if change.verdict != "real":
        return _WORDS[change.verdict]
    mean, low, high = change.percent
    if math.isnan(mean):
        return "differs"
    digits = 0 if abs(mean) >= 10 else 1 if abs(mean) >= 1 else 2
    spread = "" if math.isnan(low) else f" (95 % CI {low:+.{digits}f} to {high:+.{digits}f})"
    return f"{mean:+.{digits}f} %{spread}"


def _title(name: str) -> str:
    """The metric's label without its unit."""
    label = METRICS[name].label
    return label.rpartition(" (")[0] if label.endswith(")") else label
