"""A paper's table with ours beside it: figures in pairs, whether each claim holds, what differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from experiments.analysis.cells import CellResults
from experiments.analysis.metrics import METRICS
from experiments.analysis.run_files import RunFiles
from experiments.paper import SUSTAINED, Claim, Paper, Sustained
from experiments.storage import write_text

FILE = "paper.md"


@dataclass(frozen=True)
class Verdict:
    """What our figures say of a claim.

    Attributes:
        text: the claim.
        holds: None when a figure is missing.
        figures: that it was judged by, in words.
        words: for a claim that holds, and for one that does not.
    """

    text: str
    holds: bool | None
    figures: str
    words: tuple[str, str] = ("holds", "does not hold")

    @property
    def word(self) -> str:
        return "cannot be told" if self.holds is None else self.words[0 if self.holds else 1]


@dataclass(frozen=True)
class PaperTable:
    """What `paper.md` shows.

    Attributes:
        title: of the reproduction.
        source: of the paper's figures.
        columns: labels, after that of the rows.
        rows: label -> (the paper's figure, ours) a column, each as text, "" where there is none.
        verdicts: one a claim.
        differs: what is not as in the paper.
    """

    title: str
    source: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[tuple[str, str]]]
    verdicts: Sequence[Verdict]
    differs: str

    @property
    def heads(self) -> list[str]:
        """Two columns a figure: the paper's, and ours."""
        return [f"{label}: {whose}" for label in self.columns for whose in ("paper", "ours")]

    def markdown(self) -> str:
        """Two columns a figure: the paper's, and ours."""
        heads = self.heads
        lines = [f"**{self.title}**", "", f"Source: {' '.join(self.source.split())}", ""]
        lines += ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
        for label, pairs in self.rows.items():
            lines.append(f"| {label} | " + " | ".join(text or "-" for pair in pairs for text in pair) + " |")
        lines += ["", "| claim | | our figures |", "|---|---|---|"]
        lines += [f"| {verdict.text} | {verdict.word} | {verdict.figures} |" for verdict in self.verdicts]
        return "\n".join([*lines, "", f"What differs: {' '.join(self.differs.split())}"]) + "\n"

    def write(self, directory: Path) -> None:
        write_text(directory / FILE, self.markdown())


def order_of(text: str, names: Sequence[str], figures: Sequence[float], digits: int, factor: float = 1.0) -> Verdict:
    """Whether each figure is above the one before, and at least `factor` times it."""
    told = " < ".join(f"{name} {value:.{digits}f}" for name, value in zip(names, figures, strict=True))
    if any(math.isnan(value) for value in figures):
        return Verdict(text, None, told)
    holds = all(high > low and high >= factor * low for low, high in pairwise(figures))
    return Verdict(text, holds, told if holds else told.replace(" < ", ", "))


def match_of(label: str, pairs: Mapping[str, tuple[float, float]], within: float) -> Verdict:
    """Whether each figure of ours is the paper's but for a share of it.

    Args:
        label: of what the figures are.
        pairs: name -> (the paper's figure; ours, NaN where it is missing). Of 0 every share is 0: ours has to be 0.
        within: the share.
    """
    shares = {name: _share(*pair) for name, pair in pairs.items()}
    text, words = f"{label}: ours are the paper's within {100 * within:g} %", ("matches", "does not match")
    if any(map(math.isnan, shares.values())):
        return Verdict(text, None, "", words)
    worst = max(shares, key=lambda name: shares[name])
    by = f"by {100 * shares[worst]:.2g} %" if shares[worst] < math.inf else f"{pairs[worst][1]:.3g} in place of 0"
    return Verdict(text, shares[worst] <= within, f"{worst} differs most, {by}", words)


def _share(theirs: float, ours: float) -> float:
    """Of the paper's figure, by which ours differs from it; NaN where ours is missing."""
    if theirs:
        return abs(ours / theirs - 1)
    return ours if math.isnan(ours) else math.inf if ours else 0.0


def paper_table(run: RunFiles) -> PaperTable | None:
    """Ours are means over the seeds. None for an experiment that reproduces nothing."""
    raw = run.config.get("paper")
    if raw is None:
        return None
    paper = Paper.model_validate(raw)
    figures = {name: _figures(run.cells, name, paper) for name in paper.metrics}
    rows: dict[str, list[tuple[str, str]]] = {}
    for row in dict.fromkeys(row for column in paper.columns for row in figures[column.metric]):
        rows[row] = []
        for column in paper.columns:
            show = f".{_digits(column.metric) if column.digits is None else column.digits}f"
            theirs, ours = column.paper.get(row), figures[column.metric].get(row, math.nan)
            known = not math.isnan(ours)
            rows[row].append(("" if theirs is None else f"{theirs:{show}}", f"{ours:{show}}" if known else ""))
    labels = [column.label or _label(column.metric, paper.sustained) for column in paper.columns]
    verdicts = [_verdict(claim, figures[claim.metric]) for claim in paper.claims]
    for label, column in zip(labels, paper.columns, strict=True):
        if column.within is not None:
            pairs = {
                cell: (theirs, figures[column.metric].get(cell, math.nan)) for cell, theirs in column.paper.items()
            }
            verdicts.append(match_of(label, pairs, column.within))
    differs = " ".join([paper.differs.strip(), *run.environment_notes])
    return PaperTable(run.title, paper.source, labels, rows, verdicts, differs)


def _verdict(claim: Claim, figures: Mapping[str, float]) -> Verdict:
    values = [figures.get(cell, math.nan) for cell in claim.rising]
    return order_of(claim.text, claim.rising, values, _digits(claim.metric), claim.factor)


def _figures(cells: Sequence[CellResults], name: str, paper: Paper) -> dict[str, float]:
    rows = [paper.row_of(name, cell.label, cell.levels) for cell in cells]
    if name != SUSTAINED:
        return {row: _mean(cell, name) for row, cell in zip(rows, cells, strict=True)}
    sustained = paper.sustained
    assert sustained is not None
    curves: dict[str, list[tuple[float, float]]] = {}
    for row, cell in zip(rows, cells, strict=True):
        curves.setdefault(row, []).append((float(cell.levels[sustained.over]), _mean(cell, sustained.metric)))
    return {row: highest_within(sorted(curve), sustained.limit) for row, curve in curves.items()}


def highest_within(curve: Sequence[tuple[float, float]], limit: float) -> float:
    """Where a curve of (load, metric) first crosses the limit.

    NaN where the curve does not show it: the first load is beyond the limit, the last within, or a metric is missing.
    """
    for (low, before), (high, after) in pairwise(curve):
        if before <= limit < after:
            return low + (high - low) * (limit - before) / (after - before)
    return math.nan


def _mean(cell: CellResults, name: str) -> float:
    values = list(cell.values(METRICS[name]).values())
    return math.fsum(values) / len(values) if values else math.nan


def _digits(name: str) -> int:
    return 2 if name == SUSTAINED else METRICS[name].digits


def _label(name: str, sustained: Sustained | None) -> str:
    if name != SUSTAINED:
        return METRICS[name].label
    assert sustained is not None
    return f"{sustained.over.rpartition('.')[2]} within {sustained.limit:g} of {METRICS[sustained.metric].label}"


Computed = Callable[[], PaperTable]
"""A reproduction that is no grid of trials: its table follows from published data, a formula or a search."""
