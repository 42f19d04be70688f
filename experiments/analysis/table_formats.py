"""Tables as text: Markdown, LaTeX with booktabs, a terminal's, and tidy CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.analysis.cells import CellResults, baseline_of, change_of
from experiments.analysis.metrics import METRICS
from experiments.analysis.statistics import bootstrap_interval
from experiments.analysis.tables import Table

MOST_COLUMNS = 5  # with more cells than that, cells go down and metrics across

# A grid is the header row, then rows of (text, best, mark).

Cell = tuple[str, bool, str]
Grid = list[list[Cell]]


def as_grid(table: Table) -> Grid:
    """Header row, facts, numbers; turned over when there are many cells, so that metrics go across."""
    grid: Grid = [[_plain(table.corner), *map(_plain, table.columns)]]
    grid += [[_plain(label), *map(_plain, texts)] for label, texts in table.facts]
    grid += [[_plain(label), *((e.text, e.best, e.mark) for e in entries)] for label, entries in table.rows]
    if len(table.columns) > MOST_COLUMNS:
        return [list(row) for row in zip(*grid, strict=True)]
    return grid


def _plain(text: str) -> Cell:
    return text, False, ""


def to_markdown(table: Table) -> str:
    """The best value of each metric is bold; a star is on what differs from the baseline."""
    grid = as_grid(table)
    lines = [f"**{table.title}**", ""]
    for index, row in enumerate(grid):
        texts = [f"**{_md(text)}**{_md(mark)}" if best else _md(text) + _md(mark) for text, best, mark in row]
        lines.append("| " + " | ".join(texts) + " |")
        if index == 0:
            lines.append("|---|" + "---:|" * (len(row) - 1))
    return "\n".join([*lines, "", *(f"{_md(note)}  " for note in table.notes)]) + "\n"


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


def to_latex(table: Table) -> str:
    """A booktabs table for \\input; needs \\usepackage{booktabs}. The best value of each metric is bold."""
    grid = as_grid(table)
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "  \\centering", f"  \\caption{{{_tex(table.title)}}}"]
    lines += [f"  \\begin{{tabular}}{{l{'r' * (len(grid[0]) - 1)}}}", "    \\toprule"]
    for index, row in enumerate(grid):
        texts = [
            (f"\\textbf{{{_tex(text)}}}" if best else _tex(text)) + (f"$^{{{mark}}}$" if mark else "")
            for text, best, mark in row
        ]
        if texts[0].startswith(("[", "*")):  # which \\ of the row before would take for its own
            texts[0] = "{}" + texts[0]
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
    return (
        plain.replace("±", "$\\pm$")
        .replace("<", "$<$")
        .replace("~", "\\textasciitilde{}")
        .replace("^", "\\textasciicircum{}")
    )


def to_csv(cells: Sequence[CellResults], baseline: Mapping[str, str]) -> str:
    """Tidy: one row a cell and metric, with interval, paired change against the baseline and what it ran on."""
    factors = list(dict.fromkeys(factor for cell in cells for factor in cell.levels))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = ("mean", "low", "high", "seeds", "change_percent", "change_low", "change_high", "p")
    writer.writerow(["cell", *factors, "metric", "label", *numbers, "difference", "against", "measured", "load",
                     "machine", "verdict"])  # fmt: skip
    for cell in cells:
        other = baseline_of(cell, cells, baseline)
        for name, metric in METRICS.items():
            values = cell.values(metric)
            interval = bootstrap_interval(list(values.values()))
            if math.isnan(interval.mean):
                continue
            change = change_of(cell, other, metric)
            shown = ["" if math.isnan(value) else f"{value:.6g}" for value in (*interval, *change.percent, change.p)]
            levels = [cell.levels.get(factor, "") for factor in factors]
            known = sum(not math.isnan(value) for value in values.values())
            compared = ["", ""] if other is None else [change.verdict, other.label]
            origin = [cell.kind.partition(",")[0], cell.loop, "; ".join(sorted(cell.machines)), cell.verdict]
            row = [cell.label, *levels, name, metric.label, *shown[:3], known, *shown[3:], *compared, *origin]
            writer.writerow(row)
    return out.getvalue()


def to_rich(table: Table, width: int) -> Any:
    """For a terminal of `width` characters, as a rich renderable; columns that do not fit side by side go below."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = as_grid(table)
    pages = _pages(grid, width)
    shown = [RichTable(title_justify="left", caption_justify="left") for _ in pages]
    shown[0].title, shown[-1].caption = Text(table.title), Text(" ".join(table.notes))
    for page, columns in zip(shown, pages, strict=True):
        for column in columns:
            page.add_column(Text(grid[0][column][0]), justify="right" if column else "left", width=_wide(grid, column))
        for index, row in enumerate(grid[1:], 1):
            end = index == len(table.facts) and len(table.columns) <= MOST_COLUMNS
            entries = (row[column] for column in columns)
            texts = (Text(text + mark, style="bold green" if best else "") for text, best, mark in entries)
            page.add_row(*texts, end_section=end)
    return Group(*shown)


def _wide(grid: Grid, column: int) -> int:
    """Characters of a column whose header may break between words."""
    words = max(map(len, grid[0][column][0].split()), default=0)
    return max(words, *(len(row[column][0]) + len(row[column][2]) for row in grid[1:]))


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
