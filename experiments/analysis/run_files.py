"""A run directory as the analysis reads it: configuration, plan, environment, cells, and each trial's records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from experiments.analysis.cells import CellResults
from experiments.analysis.environments import (
    RanUnder,
    differing_facts,
    facts_of,
    named,
    notes_of,
    values_of,
    without_record,
)
from experiments.config import ConfigError
from experiments.storage import read_environment, read_summary
from research_engine import metrics
from research_engine.yaml_text import read_yaml

if TYPE_CHECKING:
    import pandas as pd

    from research_engine.engine.records import Records

_TRIAL = {"cell", "levels", "seed", "directory"}
MOST_PANELS = 9  # cells of a plot over time


@dataclass(frozen=True)
class RunFiles:
    """One run directory.

    Raises (of):
        ConfigError: the directory is no run.
    """

    directory: Path
    config: Mapping[str, Any]
    plan: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]

    @classmethod
    def of(cls, directory: Path) -> RunFiles:
        try:
            _, config = read_yaml((directory / "config.yaml").read_text(encoding="utf-8"))
            plan, environment = (
                json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))
                for name in ("trials", "environment")
            )
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{directory}: no run directory: {error}") from error
        wrong = None
        if not isinstance(config, Mapping) or "name" not in config:
            wrong = "config.yaml holds no experiment"
        elif not isinstance(plan, list) or not all(isinstance(t, Mapping) and t.keys() >= _TRIAL for t in plan):
            wrong = f"trials.json must be a list of trials with {', '.join(sorted(_TRIAL))}"
        elif not isinstance(environment, Mapping):
            wrong = "environment.json must be a mapping"
        if wrong is not None:
            raise ConfigError(f"{directory}: no run directory: {wrong}")
        return cls(directory, config, plan, environment)

    @cached_property
    def cells(self) -> list[CellResults]:
        """In the plan's order, with the summaries of their finished trials."""
        failures = self._failures()
        grouped: dict[str, list[Mapping[str, Any]]] = {}
        for trial in self.plan:
            grouped.setdefault(trial["cell"], []).append(trial)
        cells = []
        for label, trials in grouped.items():
            found = {(t["seed"], t.get("repeat", 0)): read_summary(self.folder(t)) for t in trials}
            done = {key: summary for key, summary in found.items() if summary is not None}
            holes = {f"{label}, seed {t['seed']}": failures[t["directory"]]["reason"]
                     for t in trials if t["directory"] in failures}  # fmt: skip
            cells.append(CellResults(label, trials[0]["levels"], done, len(trials), holes))
        return cells

    @property
    def summaries(self) -> list[Mapping[str, Any]]:
        return [summary for cell in self.cells for summary in cell.summaries.values()]

    @cached_property
    def ran_under(self) -> Sequence[RanUnder]:
        """Under what each finished trial ran."""
        return [
            RanUnder(_name(trial), self.summary(trial)["kind"], read_environment(self.folder(trial)))
            for trial in self.finished()
        ]

    @property
    def environment_notes(self) -> list[str]:
        """Footnotes of tables when trials ran in different environments, or it isn't known of all; none otherwise."""
        return notes_of(self.ran_under)

    @property
    def facts(self) -> dict[str, Any]:
        """Dotted key -> what the trials ran under, all values with their counts where they differ; what no trial says,
        as the run's last start has it. `no record`: the trials of which nothing is known.
        """
        said = {
            key: value for one in reversed(self.ran_under) for key, value in facts_of(one.environment or {}).items()
        }
        several = {key: values_of(told) for key, told in differing_facts(self.ran_under).items()}
        without = without_record(self.ran_under)
        return facts_of(self.environment) | said | several | ({"no record": named(without)} if without else {})

    @property
    def baseline(self) -> Mapping[str, str]:
        return self.config.get("baseline") or {}

    @property
    def title(self) -> str:
        name, description = self.config["name"], self.config.get("description")
        return f"{name}: {description}" if description else name

    @property
    def caption(self) -> str:
        """One line for a plot: experiment, model, machine, and the factors that a cell's label has the levels of."""
        machines = ", ".join(sorted({_on(summary["kind"], summary["machine"]) for summary in self.summaries}))
        what = (self.config.get("base") or {}).get("model") or (self.config.get("base") or {}).get("op") or ""
        factors = ", ".join(dict.fromkeys(factor for cell in self.cells for factor in cell.levels))
        by = f"by {factors}" if factors else ""
        return "  ·  ".join(part for part in (self.config["name"], what, machines, by) if part)

    def folder(self, trial: Mapping[str, Any]) -> Path:
        return self.directory / "trials" / str(trial["directory"])

    def finished(self) -> list[Mapping[str, Any]]:
        """The plan's trials that are finished."""
        return [trial for trial in self.plan if read_summary(self.folder(trial)) is not None]

    def first_of_each_cell(self) -> dict[str, Mapping[str, Any]]:
        """Cell -> its first finished trial; all of the same seed where that is possible."""
        out: dict[str, Mapping[str, Any]] = {}
        for trial in sorted(self.finished(), key=lambda trial: (trial["seed"], trial.get("repeat", 0))):
            out.setdefault(trial["cell"], trial)
        return {cell.label: out[cell.label] for cell in self.cells if cell.label in out}

    @cached_property
    def first_records(self) -> dict[str, Records]:
        """Cell -> records of its first finished trial, of as many cells as a plot has panels for."""
        return {cell: self.records(trial) for cell, trial in islice(self.first_of_each_cell().items(), MOST_PANELS)}

    def records(self, trial: Mapping[str, Any]) -> Records:
        """What a serving trial left behind."""
        return metrics.read_frames(*(self.frame(trial, name) for name in ("requests", "steps")))

    def frame(self, trial: Mapping[str, Any], name: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """A Parquet file of a finished trial.

        Raises:
            ConfigError: it is gone or damaged; says what to do.
        """
        import pandas as pd

        path = self.folder(trial) / f"{name}.parquet"
        try:
            return pd.read_parquet(path, columns=None if columns is None else list(columns))
        except (OSError, ValueError) as error:
            remedy = f"remove {path.parent} and run the experiment again with --out {self.directory}"
            raise ConfigError(f"{path}: cannot be read; {remedy}: {error}") from error

    def summary(self, trial: Mapping[str, Any]) -> Mapping[str, Any]:
        found = read_summary(self.folder(trial))
        assert found is not None
        return found

    def _failures(self) -> Mapping[str, Any]:
        try:
            failures: Mapping[str, Any] = json.loads((self.directory / "failures.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return failures


def _name(trial: Mapping[str, Any]) -> str:
    """Of a trial in the plan, as messages of a run have it."""
    repeat = trial.get("repeat", 0)
    return f"{trial['cell']}, seed {trial['seed']}" + (f", repeat {repeat}" if repeat else "")


def _on(kind: str, machine: str) -> str:
    """`real: AMD EPYC, 2 cores`; a simulated machine says so itself."""
    return machine if machine.startswith(kind) else f"{kind}: {machine}"
