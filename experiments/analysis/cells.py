"""The finished trials of each cell, what speaks against them, and the cell that each is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from experiments.analysis.metrics import Metric, Summary
from experiments.analysis.statistics import NO_CHANGE, Change, paired_change

VERDICTS = {
    "void": "achieved arrival rate more than 1 % off the offered one",
    "unstable": "requests in the system grew to the end of the arrivals, so latencies depend on the run's length",
    "disturbed": "other processes took more than 10 % of the cores; a quieter machine helps, or fewer threads "
    "(OMP_NUM_THREADS=1). Finished trials are kept: delete their directories, or take a new --out, to run them again",
}


@dataclass(frozen=True)
class CellResults:
    """One cell.

    Attributes:
        label, levels: of the cell.
        summaries: (seed, repeat) -> summary of the finished trial.
        planned: how many there should be.
        holes: trial -> why it failed, of those that did.
    """

    label: str
    levels: Mapping[str, str]
    summaries: Mapping[tuple[int, int], Summary]
    planned: int
    holes: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What its rows say of it: `real` or `simulated`, and the device in one word."""
        kinds = {f"{s['kind']}, {'GPU' if 'NVIDIA' in s['machine'] else 'CPU'}" for s in self.summaries.values()}
        return " and ".join(sorted(kinds)) or "no trial"

    @property
    def loop(self) -> str:
        """How its load came; empty for kernels, which have none."""
        loops = {str(s.get("workload", {}).get("loop", "")) for s in self.summaries.values()}
        return " and ".join(sorted(loops - {""}))

    @property
    def machines(self) -> set[str]:
        return {summary["machine"] for summary in self.summaries.values()}

    @property
    def seeds(self) -> set[int]:
        return {seed for seed, _ in self.summaries}

    @property
    def verdict(self) -> str:
        """What speaks against its numbers, or "ok"."""
        marks = []
        for name in VERDICTS:
            count = self.marked(name)
            if count:
                marks.append(f"{name} {count}/{len(self.summaries)}")
        missing = self.planned - len(self.summaries)
        if missing:
            marks.append(f"{missing} of {self.planned} missing")
        return ", ".join(marks) or "ok"

    def marked(self, verdict: str) -> int:
        """How many trials carry a mark out of VERDICTS."""
        return sum(bool(summary[verdict]) for summary in self.summaries.values())

    @property
    def is_sound(self) -> bool:
        """Whether its numbers are the system's: no load generator was too slow (void), no other process in the way."""
        return not self.marked("void") and not self.marked("disturbed")

    def values(self, metric: Metric) -> dict[int, float]:
        """Seed -> the metric, averaged over the seed's repeats; NaN where there is none, or too few values for it."""
        by_seed: dict[int, list[float]] = {}
        for (seed, _), summary in sorted(self.summaries.items()):
            by_seed.setdefault(seed, []).append(metric.value(summary))
        return {seed: math.fsum(values) / len(values) for seed, values in by_seed.items()}


def baseline_of(cell: CellResults, cells: Sequence[CellResults], baseline: Mapping[str, str]) -> CellResults | None:
    """What a cell is compared with: the cell of its own levels, but those of the baseline where that names some.

    Where the grid has none such, the first cell that has all of the baseline's levels. None for a cell that has them
    itself, and without a baseline.
    """
    if not baseline or baseline.items() <= cell.levels.items():
        return None
    wanted = {**cell.levels, **baseline}
    exact = next((other for other in cells if dict(other.levels) == wanted), None)
    return exact or next((other for other in cells if baseline.items() <= other.levels.items()), None)


def change_of(cell: CellResults, baseline: CellResults | None, metric: Metric) -> Change:
    """The paired difference; unknown when one of the two has trials that say nothing of the system."""
    if baseline is None or not cell.is_sound or not baseline.is_sound:
        return NO_CHANGE
    return paired_change(cell.values(metric), baseline.values(metric))
