"""Tables of an experiment: one entry a metric and cell, as text for a terminal, Markdown, LaTeX, and as tidy CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.analysis.statistics import Interval, bootstrap_interval, paired_change

Summary = Mapping[str, Any]
VERDICTS = {
    "void": "achieved arrival rate more than 1 % off the offered one",
    "unstable": "requests in the system grew to the end of the arrivals, so latencies depend on the run's length",
    "disturbed": "other processes took more than 10 % of the cores",
}
MOST_COLUMNS = 5  # with more cells than that, cells go down and metrics across


@dataclass(frozen=True)
class Metric:
    """How a number of a trial's summary is named and shown.

    Args:
        label: with its unit.
        read: takes it out of a summary; NaN where the summary has none.
        digits: after the point.
        better: which end is best; None for what is neither.
    """

    label: str
    read: Callable[[Summary], float]
    digits: int
    better: Literal["lower", "higher"] | None = None


def _at(*path: str, scale: float = 1.0) -> Callable[[Summary], float]:
    def read(summary: Summary) -> float:
        value: Any = summary
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return math.nan if value is None else float(value) * scale

    return read


def _most_urgent(metric: str, point: str) -> Callable[[Summary], float]:
    def read(summary: Summary) -> float:
        classes = summary["metrics"]["by_priority"]
        return _at(metric, point)(classes[min(classes, key=int)]) if classes else math.nan

    return read


def _latencies() -> dict[str, Metric]:
    out = {}
    for name, title, unit, scale, digits in (
        ("ttft", "TTFT", "s", 1.0, 2),
        ("tpot", "TPOT", "ms", 1e3, 0),
        ("itl", "ITL", "ms", 1e3, 0),
        ("e2e", "E2E", "s", 1.0, 2),
        ("normalized_latency", "Norm. latency", "ms/token", 1e3, 0),
        ("queueing_delay", "Queueing", "s", 1.0, 2),
    ):
        for point in ("mean", "p50", "p90", "p99"):
            label = f"{title} {point.upper() if point != 'mean' else 'mean'} ({unit})"
            out[f"{name}_{point}"] = Metric(label, _at("metrics", name, point, scale=scale), digits, "lower")
    return out


METRICS: dict[str, Metric] = {
    **_latencies(),
    "urgent_ttft_p50": Metric("TTFT P50, urgent (s)", _most_urgent("ttft", "p50"), 2, "lower"),
    "urgent_ttft_p90": Metric("TTFT P90, urgent (s)", _most_urgent("ttft", "p90"), 2, "lower"),
    "urgent_e2e_p90": Metric("E2E P90, urgent (s)", _most_urgent("e2e", "p90"), 2, "lower"),
    "request_throughput": Metric("Requests/s", _at("metrics", "request_throughput"), 2, "higher"),
    "output_throughput": Metric("Output tokens/s", _at("metrics", "output_throughput"), 1, "higher"),
    "total_throughput": Metric("All tokens/s", _at("metrics", "total_throughput"), 1, "higher"),
    "goodput": Metric("Goodput (requests/s)", _at("metrics", "goodput"), 2, "higher"),
    "slo_attainment": Metric("SLO attainment (%)", _at("metrics", "slo_attainment", scale=100), 1, "higher"),
    "completed": Metric("Completed", _at("metrics", "num_completed"), 0),
    "failed": Metric("Failed", _at("metrics", "num_failed"), 0),
    "duration": Metric("Duration (s)", _at("metrics", "duration"), 1),
    "steps": Metric("Steps", _at("metrics", "num_steps"), 0),
    "batch_size": Metric("Mean batch", _at("metrics", "batch_size"), 1),
    "preemptions": Metric("Preemptions", _at("metrics", "preemption", "events"), 1, "lower"),
    "tokens_recomputed": Metric("Tokens recomputed", _at("metrics", "preemption", "tokens_recomputed"), 0, "lower"),
    "kv_utilization": Metric("KV utilization (%)", _at("metrics", "kv", "utilization", scale=100), 1, "higher"),
    "kv_token_states": Metric(
        "KV token states (%)", _at("metrics", "kv_split", "token_states", scale=100), 1, "higher"
    ),
    "kv_reserved": Metric("KV reserved (%)", _at("metrics", "kv_split", "reserved", scale=100), 1, "lower"),
    "kv_internal": Metric("KV internal waste (%)", _at("metrics", "kv_split", "internal", scale=100), 1, "lower"),
    "kv_external": Metric("KV external waste (%)", _at("metrics", "kv_split", "external", scale=100), 1, "lower"),
    "kv_occupancy": Metric("KV blocks in use (%)", _at("metrics", "kv", "occupancy", scale=100), 1),
    "prefix_hit_rate": Metric("Prefix hits (%)", _at("metrics", "prefix_hit_rate", scale=100), 1),
    "service_difference_max": Metric(
        "Service diff. max (tokens/s)", _at("metrics", "service_difference", "max"), 2, "lower"
    ),
    "service_difference_mean": Metric(
        "Service diff. (tokens/s)", _at("metrics", "service_difference", "mean"), 2, "lower"
    ),
    "predictor_kendall_tau": Metric("Predictor's tau-b", _at("workload", "predictor_kendall_tau"), 2),
    "offered_rate": Metric("Offered (requests/s)", _at("offered_rate"), 3),
    "achieved_rate": Metric("Achieved (requests/s)", _at("achieved_rate"), 3),
}
USUAL = (
    "ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99", "itl_p50", "itl_p90", "itl_p99",
    "e2e_p50", "e2e_p90", "e2e_p99", "urgent_ttft_p50", "urgent_ttft_p90", "output_throughput",
    "preemptions", "tokens_recomputed", "kv_utilization", "kv_occupancy", "offered_rate", "achieved_rate",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One number of the table."""

    text: str
    interval: Interval
    best: bool = False


@dataclass(frozen=True)
class CellResults:
    """The finished trials of one cell, by seed, and how many there should be."""

    label: str
    levels: Mapping[str, str]
    summaries: Mapping[int, Summary]
    planned: int

    @property
    def kind(self) -> str:
        """What its rows say of it: `real` or `simulated`, and the device in one word."""
        kinds = {f"{s['kind']}, {'GPU' if 'NVIDIA' in s['machine'] else 'CPU'}" for s in self.summaries.values()}
        return " and ".join(sorted(kinds)) or "no trial"

    @property
    def machines(self) -> set[str]:
        return {summary["machine"] for summary in self.summaries.values()}

    @property
    def verdict(self) -> str:
        """What speaks against its numbers, or "ok"."""
        marks = []
        for name in VERDICTS:
            count = sum(bool(summary[name]) for summary in self.summaries.values())
            if count:
                marks.append(f"{name} {count}/{len(self.summaries)}")
        missing = self.planned - len(self.summaries)
        if missing:
            marks.append(f"{missing} of {self.planned} missing")
        return ", ".join(marks) or "ok"

    def values(self, metric: Metric) -> dict[int, float]:
        return {seed: metric.read(summary) for seed, summary in self.summaries.items()}


@dataclass(frozen=True)
class Table:
    """Rows of entries under column labels. `facts` are rows of plain words above the numbers."""

    corner: str
    columns: Sequence[str]
    facts: Sequence[tuple[str, Sequence[str]]]
    rows: Sequence[tuple[str, Sequence[Entry]]]
    title: str
    notes: Sequence[str]


def build_table(
    title: str, cells: Sequence[CellResults], metrics: Sequence[str] | None = None, notes: Sequence[str] = ()
) -> Table:
    """Means over seeds with half the 95 % interval; the best mean of each metric is marked.

    Args:
        title: above the table.
        cells: in the table's order.
        metrics: names out of METRICS; the usual ones when None, less those that no cell has.
        notes: sentences below the table, added to those on spread and machines.
    """
    rows = []
    for name in metrics or USUAL:
        metric = METRICS[name]
        intervals = [bootstrap_interval(list(cell.values(metric).values())) for cell in cells]
        if metrics is None and all(math.isnan(interval.mean) for interval in intervals):
            continue
        entries = [Entry(_text(interval, metric.digits), interval) for interval in intervals]
        rows.append((metric.label, _mark_best(entries, metric)))
    facts = [("measured", [cell.kind for cell in cells]), ("verdict", [cell.verdict for cell in cells])]
    seeds = max((len(cell.summaries) for cell in cells), default=0)
    return Table("", [cell.label for cell in cells], facts, rows, title, [*_standard_notes(cells, seeds), *notes])


def _standard_notes(cells: Sequence[CellResults], seeds: int) -> list[str]:
    machines = sorted({machine for cell in cells for machine in cell.machines})
    notes = [f"Machine: {'; '.join(machines)}."] if machines else []
    if seeds > 1:
        range_ = " (with two seeds: half the range)" if seeds == 2 else ""
        notes.append(f"Mean over {seeds} seeds ± half the 95 % bootstrap interval{range_}; best mean marked.")
    elif seeds == 1:
        notes.append("One seed: no spread; best value marked.")
    marked = " ".join(cell.verdict for cell in cells)
    return notes + [f"{name}: {meaning}." for name, meaning in VERDICTS.items() if name in marked]


def _text(interval: Interval, digits: int) -> str:
    if math.isnan(interval.mean):
        return "-"
    text = f"{interval.mean:.{digits}f}"
    return text if math.isnan(interval.half_width) else f"{text} ±{interval.half_width:.{digits}f}"


def _mark_best(entries: Sequence[Entry], metric: Metric) -> list[Entry]:
    """Marks the entries whose mean looks best as printed, unless all look alike."""
    shown = [round(entry.interval.mean, metric.digits) for entry in entries]
    known = [value for value in shown if not math.isnan(value)]
    if metric.better is None or len(set(known)) < 2:
        return list(entries)
    best = min(known) if metric.better == "lower" else max(known)
    return [Entry(e.text, e.interval, value == best) for e, value in zip(entries, shown, strict=True)]


# Rendering. A grid is the header row, then rows of (text, best) pairs.

Grid = list[list[tuple[str, bool]]]


def _grid(table: Table) -> Grid:
    grid: Grid = [[(table.corner, False), *((column, False) for column in table.columns)]]
    grid += [[(label, False), *((text, False) for text in texts)] for label, texts in table.facts]
    grid += [[(label, False), *((entry.text, entry.best) for entry in entries)] for label, entries in table.rows]
    if len(table.columns) > MOST_COLUMNS:
        return [list(row) for row in zip(*grid, strict=True)]
    return grid


def to_markdown(table: Table) -> str:
    grid = _grid(table)
    lines = [f"**{table.title}**", ""]
    for index, row in enumerate(grid):
        texts = [f"**{text}**" if best else text for text, best in row]
        lines.append("| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |")
        if index == 0:
            lines.append("|---|" + "---:|" * (len(row) - 1))
    return "\n".join([*lines, "", *(f"{note}  " for note in table.notes)]) + "\n"


def to_latex(table: Table) -> str:
    """A booktabs table for \\input; needs \\usepackage{booktabs}. The best value of each metric is bold."""
    grid = _grid(table)
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "  \\centering", f"  \\caption{{{_tex(table.title)}}}"]
    lines += [f"  \\begin{{tabular}}{{l{'r' * (len(grid[0]) - 1)}}}", "    \\toprule"]
    for index, row in enumerate(grid):
        texts = [f"\\textbf{{{_tex(text)}}}" if best else _tex(text) for text, best in row]
        lines.append("    " + " & ".join(texts) + " \\\\")
        if index == 0 or (index == len(table.facts) and len(table.columns) <= MOST_COLUMNS):
            lines.append("    \\midrule")
    lines += [
        "    \\bottomrule",
        "  \\end{tabular}",
        f"  \\par\\smallskip\\footnotesize {_tex(' '.join(table.notes))}",
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _tex(text: str) -> str:
    plain = "".join(f"\\{c}" if c in "&%$#_{}" else c for c in text.replace("\\", "/"))
    return plain.replace("±", "$\\pm$").replace("~", "\\textasciitilde{}").replace("^", "\\textasciicircum{}")


def to_csv(cells: Sequence[CellResults], baseline: CellResults | None) -> str:
    """Tidy: one row a cell and metric, with interval, paired change against the baseline and what it ran on."""
    factors = list(dict.fromkeys(factor for cell in cells for factor in cell.levels))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = ("mean", "low", "high", "seeds", "change_percent", "change_low", "change_high")
    writer.writerow(["cell", *factors, "metric", "label", *numbers, "measured", "machine", "verdict"])
    for cell in cells:
        for name, metric in METRICS.items():
            values = cell.values(metric)
            interval = bootstrap_interval(list(values.values()))
            if math.isnan(interval.mean):
                continue
            no_change = Interval(math.nan, math.nan, math.nan)
            change = no_change if baseline is None else paired_change(values, baseline.values(metric))
            shown = ["" if math.isnan(value) else f"{value:.6g}" for value in (*interval, *change)]
            levels = [cell.levels.get(factor, "") for factor in factors]
            origin = [cell.kind.partition(",")[0], "; ".join(sorted(cell.machines)), cell.verdict]
            writer.writerow([cell.label, *levels, name, metric.label, *shown[:3], len(values), *shown[3:], *origin])
    return out.getvalue()


def to_rich(table: Table, width: int) -> Any:
    """For a terminal of `width` characters, as a rich renderable; columns that do not fit side by side go below."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = _grid(table)
    pages = _pages(grid, width)
    shown = [RichTable(title_justify="left", caption_justify="left") for _ in pages]
    shown[0].title, shown[-1].caption = table.title, " ".join(table.notes)
    for page, columns in zip(shown, pages, strict=True):
        for column in columns:
            page.add_column(Text(grid[0][column][0]), justify="right" if column else "left", width=_wide(grid, column))
        for index, row in enumerate(grid[1:], 1):
            end = index == len(table.facts) and len(table.columns) <= MOST_COLUMNS
            entries = (row[column] for column in columns)
            page.add_row(*(Text(text, style="bold green" if best else "") for text, best in entries), end_section=end)
    return Group(*shown)


def _wide(grid: Grid, column: int) -> int:
    """Characters of a column whose header may break between words."""
    words = max(map(len, grid[0][column][0].split()), default=0)
    return max(words, *(len(row[column][0]) for row in grid[1:]))


def _pages(grid: Grid, width: int) -> list[list[int]]:
    """Columns that fit beside each other, the first one on every page."""
    frame = 3  # a border and two blanks
    labels = 1 + _wide(grid, 0) + frame
    pages, room = [[0]], width - labels
    for column in range(1, len(grid[0])):
        if room < _wide(grid, column) + frame and len(pages[-1]) > 1:
            pages.append([0])
            room = width - labels
        pages[-1].append(column)
        room -= _wide(grid, column) + frame
    return pages
