"""Tables of an experiment: the numbers of each cell, and its paired changes against the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.analysis.cells import VERDICTS, CellResults, baseline_of, change_of
from experiments.analysis.metrics import METRICS, USUAL, USUAL_OF_KERNELS, Metric
from experiments.analysis.statistics import ENOUGH_SEEDS, Interval, bootstrap_interval, values_needed

MARK = "*"  # on what differs from the baseline


@dataclass(frozen=True)
class Entry:
    """One number of the table."""

    text: str
    interval: Interval
    best: bool = False
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of entries under column labels. `facts` are rows of plain words above the numbers."""

    corner: str
    columns: Sequence[str]
    facts: Sequence[tuple[str, Sequence[str]]]
    rows: Sequence[tuple[str, Sequence[Entry]]]
    title: str
    notes: Sequence[str]

    def of_results(self) -> Table | None:
        """Without the columns of dashes alone, which a note names; None where there are no others."""
        kept = [at for at in range(len(self.columns)) if any(entries[at].text != "-" for _, entries in self.rows)]
        if not kept or len(kept) == len(self.columns):
            return self if kept else None
        empty = [label for at, label in enumerate(self.columns) if at not in kept]
        return replace(
            self,
            columns=[self.columns[at] for at in kept],
            facts=[(name, [words[at] for at in kept]) for name, words in self.facts],
            rows=[(name, [entries[at] for at in kept]) for name, entries in self.rows],
            notes=[*self.notes, f"No result yet: {'; '.join(empty)}."],
        )


def build_table(
    title: str,
    cells: Sequence[CellResults],
    metrics: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    baseline: Mapping[str, str] | None = None,
) -> Table:
    """Means over seeds with half the 95 % interval; the best mean of each metric, and what differs from the baseline.

    Args:
        title: above the table.
        cells: in the table's order.
        metrics: names out of METRICS; the usual ones when None, less those that no cell has.
        notes: sentences below the table, added to those on spread and machines.
        baseline: factor -> label, that cells are compared with.
    """
    names = list(metrics or _usual(cells))
    rows, marks, within = [], False, False
    for name in names:
        metric = METRICS[name]
        digits = digits_of(metric, cells)
        entries = []
        for cell in cells:
            entry, is_within = _entry(cell, metric, digits)
            within |= is_within
            change = change_of(cell, baseline_of(cell, cells, baseline or {}), metric)
            if change.verdict == "real":
                entry, marks = replace(entry, mark=MARK), True
            entries.append(entry)
        rows.append((metric.label, _mark_best(entries, cells, metric, digits, baseline or {})))
    facts = [("measured", [cell.kind for cell in cells]), ("verdict", [cell.verdict for cell in cells])]
    if any("closed" in cell.loop for cell in cells):
        facts.insert(1, ("load", [cell.loop for cell in cells]))
    all_notes = [
        *_standard_notes(cells, within, baseline or {}),
        *_count_notes(cells, names),
        *_hole_notes(cells),
        *notes,
    ]
    if marks:
        all_notes.append(f"{MARK}: differs from {_words(baseline or {})} under the same seeds. {_CRITERION}")
    return Table("", [cell.label for cell in cells], facts, rows, title, all_notes)


def build_effects(
    title: str,
    cells: Sequence[CellResults],
    baseline: Mapping[str, str],
    metrics: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Table | None:
    """Changes against the baseline in percent with 95 % intervals, paired by seed; None where nothing is compared.

    Args:
        title, cells, metrics, notes: as `build_table` takes them.
        baseline: factor -> label.
    """
    pairs = [(cell, baseline_of(cell, cells, baseline)) for cell in cells]
    compared = [(cell, other) for cell, other in pairs if other is not None]
    if not compared:
        return None
    rows, fewest = [], math.inf
    for name in metrics or _usual([cell for cell, _ in compared]):
        metric = METRICS[name]
        if metric.better is None:
            continue
        changes = [change_of(cell, other, metric) for cell, other in compared]
        if all(math.isnan(change.percent.mean) for change in changes):
            continue
        fewest = min([fewest, *(change.seeds for change in changes if change.seeds)])
        entries = []
        for change in changes:
            better = change.percent.mean < 0 if metric.better == "lower" else change.percent.mean > 0
            is_real = change.verdict == "real"
            entries.append(Entry(_percent(change.percent), change.percent, better and is_real, MARK if is_real else ""))
        rows.append((metric.label, entries))
    if not rows:
        return None
    facts = [("against", [other.label for _, other in compared]), ("verdict", [cell.verdict for cell, _ in compared])]
    own = ["Change of the mean in percent, [95 % BCa bootstrap interval] of the ratio of the means, by seeds.",
           f"{MARK}: shown to differ; bold where it is better. {_CRITERION}"]  # fmt: skip
    if any(math.isnan(entry.interval.low) and entry.text != "-" for _, entries in rows for entry in entries):
        own.append("No interval: one seed alone, or a baseline whose own interval reaches 0.")
    if fewest < ENOUGH_SEEDS:
        own.append(_too_few(int(fewest)))
    columns = [cell.label for cell, _ in compared]
    return Table("change (%)", columns, facts, rows, f"{title}: changes", [*own, *notes])


_CRITERION = (
    "The 95 % BCa interval of the paired differences excludes 0 and an exact sign-flip test gives p < 0.05; "
    "for one comparison alone, not corrected for their number."
)


def _usual(cells: Sequence[CellResults]) -> list[str]:
    summaries = [summary for cell in cells for summary in cell.summaries.values()]
    if any("kernel" in summary for summary in summaries):
        return list(USUAL_OF_KERNELS)
    out = []
    for name in USUAL:
        if name in ("goodput", "slo_attainment") and not any(summary.get("slo") for summary in summaries):
            continue
        values = [METRICS[name].read(summary) for summary in summaries]
        if all(math.isnan(value) for value in values) or (name in ("failed", "prefix_hit_rate") and not any(values)):
            continue
        out.append(name)
    return out


def digits_of(metric: Metric, cells: Sequence[CellResults]) -> int:
    """The metric's own digits, or as many as the largest value needs to show two that count."""
    values = [abs(value) for cell in cells for value in cell.values(metric).values() if value == value]
    largest = max(values, default=0.0)
    if metric.better is None or not 0 < largest < math.inf:
        return metric.digits
    return max(metric.digits, min(6, 1 - math.floor(math.log10(largest))))


def _entry(cell: CellResults, metric: Metric, digits: int) -> tuple[Entry, bool]:
    """Of one cell; and whether its spread is that within one run."""
    values = cell.values(metric)
    interval, within = bootstrap_interval(list(values.values())), False
    if len(cell.summaries) == 1 and not math.isnan(interval.mean):
        half = metric.within_run(next(iter(cell.summaries.values())))
        if not math.isnan(half):
            interval, within = Interval(interval.mean, interval.mean - half, interval.mean + half), True
    text = _text(interval, digits)
    if text == "-" and any(not metric.is_supported(summary) for summary in cell.summaries.values()):
        text = f"n < {values_needed(99)}"
    return Entry(text, interval), within


def _standard_notes(cells: Sequence[CellResults], within: bool, baseline: Mapping[str, str]) -> list[str]:
    machines = sorted({machine for cell in cells for machine in cell.machines})
    notes = [f"Machine: {'; '.join(machines)}."] if machines else []
    seeds = max((len(cell.seeds) for cell in cells), default=0)
    others = [factor for factor in (cells[0].levels if cells else ()) if baseline and factor not in baseline]
    best = f"best mean of each {' and '.join(others)}" if others else "best mean"
    if seeds > 1:
        range_ = " (with two seeds: half the range)" if seeds == 2 else ""
        notes.append(f"Mean over {seeds} seeds ± half the 95 % bootstrap interval{range_}; {best} marked.")
        if seeds < ENOUGH_SEEDS:
            notes.append(_too_few(seeds))
    elif seeds == 1:
        spread = "± is half the 95 % interval of batch means within the run" if within else "no spread"
        notes.append(f"One seed: {spread}; {best.replace('mean', 'value')} marked.")
    marked = " ".join(cell.verdict for cell in cells)
    return notes + [f"{name}: {meaning}." for name, meaning in VERDICTS.items() if name in marked]


def _too_few(seeds: int) -> str:
    return (
        f"{seeds} seeds are too few to show a difference: even if all agree, p is {2 / 2**seeds:.2g}; "
        f"{ENOUGH_SEEDS} are needed for p < 0.05: seeds=[{','.join(map(str, range(ENOUGH_SEEDS)))}]."
    )


def _count_notes(cells: Sequence[CellResults], names: Sequence[str]) -> list[str]:
    summaries = [summary for cell in cells for summary in cell.summaries.values()]
    if all(METRICS[name].is_supported(summary) for name in names for summary in summaries):
        return []
    need = values_needed(99)
    return [f"n < {need}: a P99 is shown from {need} values on, of which one lies beyond it with 99 % confidence."]


def _hole_notes(cells: Sequence[CellResults]) -> list[str]:
    return [f"Failed twice: {trial}: {why}." for cell in cells for trial, why in cell.holes.items()]


def _words(baseline: Mapping[str, str]) -> str:
    return ", ".join(baseline.values())


def _text(interval: Interval, digits: int) -> str:
    if math.isnan(interval.mean):
        return "-"
    text = f"{interval.mean:.{digits}f}"
    return text if math.isnan(interval.half_width) else f"{text} ±{interval.half_width:.{digits}f}"


def _percent(change: Interval) -> str:
    if math.isnan(change.mean):
        return "-"
    text = f"{change.mean:+.1f}"
    return text if math.isnan(change.low) else f"{text} [{change.low:+.1f}, {change.high:+.1f}]"


def _mark_best(
    entries: Sequence[Entry], cells: Sequence[CellResults], metric: Metric, digits: int, baseline: Mapping[str, str]
) -> list[Entry]:
    """Marks the entries whose mean looks best as printed, unless all look alike; void or disturbed cells are none.

    Cells compete with those that differ from them in the baseline's factors alone: policies under the same load, not a
    policy under a low load with another under a high one. Without a baseline all compete.
    """
    groups: dict[tuple[str, ...], list[float]] = {}
    shown = []
    for entry, cell in zip(entries, cells, strict=True):
        group = tuple(label for factor, label in cell.levels.items() if baseline and factor not in baseline)
        value = round(entry.interval.mean, digits) if cell.is_sound else math.nan
        shown.append((group, value))
        if not math.isnan(value):
            groups.setdefault(group, []).append(value)
    if metric.better is None:
        return list(entries)
    best = {group: min(values) if metric.better == "lower" else max(values)
            for group, values in groups.items() if len(set(values)) > 1}  # fmt: skip
    return [replace(entry, best=value == best.get(group)) for entry, (group, value) in zip(entries, shown, strict=True)]
