"""What an experiment is: a base, factors with levels, which cells of their grid run, seeds, and what is made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from experiments.paper import SUSTAINED, Paper
from experiments.settings import Settings, nearest_first

Condition = Mapping[str, tuple[str, ...]]
"""Factor -> labels; a cell meets it when each of these factors has one of its labels."""

PlotKind = Literal[
    "latency_cdf",
    "latency_load",
    "pareto",
    "kv_over_time",
    "batch_composition",
    "fairness_over_time",
    "heatmap",
    "bars",
]


class Plot(Settings):
    """One plot; a word alone takes the defaults.

    Args:
        kind:
            `latency_cdf` (distributions of TTFT, ITL and E2E); `latency_load` (a metric against a factor, a line for
            each combination of the others); `pareto` (TTFT against throughput, and who is beaten by nobody);
            `kv_over_time`, `batch_composition`, `fairness_over_time` (of the first seed); `heatmap` (a metric over two
            factors); `bars` (a metric for each cell).
        metric: name out of the table's metrics; None takes a usual one of the kind.
        x, y: factors; None takes the first ones that fit.
    """

    kind: PlotKind
    metric: str | None = None
    x: str | None = None
    y: str | None = None

    @model_validator(mode="after")
    def _honoured(self) -> Plot:
        takes = {"latency_load": ("metric", "x"), "heatmap": ("metric", "x", "y"), "bars": ("metric",)}
        for name in ("metric", "x", "y"):
            if getattr(self, name) is not None and name not in takes.get(self.kind, ()):
                raise ValueError(f"{self.kind} takes no {name}")
        if self.metric is not None:
            from experiments.analysis.metrics import METRICS

            if self.metric not in METRICS:
                raise ValueError(f"no metric {self.metric!r}; {nearest_first(self.metric, METRICS)}")
        return self


class Level(Settings):
    """One level of a factor: a name, and the settings that make it. A plain value in YAML sets the factor's own key.

    Args:
        label: as tables show it.
        set: dotted key -> value.
    """

    label: str
    set: Mapping[str, Any]


class Outputs(Settings):
    """What is made of the finished trials.

    Args:
        table: metrics of the table, top to bottom; None takes the usual ones.
        plots: by kind; see `Plot`. None takes the usual ones: `latency_cdf` of requests, a bar chart of kernels.
    """

    table: tuple[str, ...] | None = None
    plots: tuple[Plot, ...] | None = None

    @field_validator("plots", mode="before")
    @classmethod
    def _by_kind(cls, plots: Any) -> Any:
        return (
            [{"kind": plot} if isinstance(plot, str) else plot for plot in plots] if isinstance(plots, list) else plots
        )

    @field_validator("table")
    @classmethod
    def _known_metrics(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        from experiments.analysis.metrics import METRICS

        for name in names or ():
            if name not in METRICS:
                raise ValueError(f"no metric {name!r}; {nearest_first(name, METRICS)}")
        return names


class Experiment(Settings):
    """A whole experiment.

    Args:
        name: of the run directory.
        description: one line for --list.
        base: settings that all trials share.
        measures: `serving` (requests on an engine) or `kernels` (ops alone, timed as `bench kernels` does).
        factors: dotted key of a setting (or any name, with levels that say what they set) -> levels.
        grid: `full` combines every level with every other; `paired` takes the first levels of all factors together,
            then the second ones, and so on: all factors have as many levels.
        include: conditions, factor -> label or labels; only cells that meet one of them run. Empty: all.
        exclude: conditions; cells that meet one of them do not run.
        seeds: each cell of the grid runs with each; all cells see the same arrivals and lengths under one seed.
        repeats: of every cell and seed. Repeats of a seed are averaged before anything is said of seeds.
        order: of the trials of a seed: `random` (the same for every run, and different from seed to seed, so that a
            drift of the machine meets no level more than another), or `as_written`.
        baseline: factor -> label of the level that others are compared with.
        outputs: tables and plots.
        paper: the table that this reproduces, with the paper's figures and claims.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    base: Mapping[str, Any] = Field(default_factory=dict)
    measures: Literal["serving", "kernels"] = "serving"
    factors: Mapping[str, tuple[Level, ...]] = Field(default_factory=dict)
    grid: Literal["full", "paired"] = "full"
    include: tuple[Condition, ...] = ()
    exclude: tuple[Condition, ...] = ()
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    repeats: int = Field(default=1, ge=1)
    order: Literal["random", "as_written"] = "random"
    baseline: Mapping[str, str] = Field(default_factory=dict)
    outputs: Outputs = Outputs()
    paper: Paper | None = None

    @field_validator("factors", mode="before")
    @classmethod
    def _levels(cls, factors: Any) -> Any:
        if not isinstance(factors, dict):
            return factors
        out = {}
        for name, levels in factors.items():
            if not isinstance(levels, list) or not levels:
                raise PydanticCustomError("at", "a factor needs a list of levels", {"at": name})
            out[name] = [x if is_level(x) else {"label": label_of(x), "set": {name: x}} for x in levels]
            labels = [str(level.get("label")) for level in out[name]]
            if len(set(labels)) < len(labels):
                raise PydanticCustomError(
                    "at", "two levels are alike in {names}", {"at": name, "names": ", ".join(labels)}
                )
        return out

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _conditions(cls, conditions: Any) -> Any:
        if not isinstance(conditions, list) or not all(isinstance(condition, dict) for condition in conditions):
            raise ValueError("must be a list of conditions, such as [{scheduler: fcfs, block_size: [8, 16]}]")
        return [
            {factor: [label_of(x) for x in (labels if isinstance(labels, list) else [labels])]
             for factor, labels in condition.items()}
            for condition in conditions
        ]  # fmt: skip

    @field_validator("baseline", mode="before")
    @classmethod
    def _labels(cls, baseline: Any) -> Any:
        return {key: label_of(value) for key, value in baseline.items()} if isinstance(baseline, dict) else baseline

    @field_validator("seeds")
    @classmethod
    def _distinct(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or min(seeds) < 0 or max(seeds) >= 2**63:  # results.parquet holds 64 bits
            raise ValueError(f"{list(seeds)} must be distinct integers >= 0 and < 2^63")
        return seeds

    @model_validator(mode="after")
    def _known_levels(self) -> Experiment:
        named = [("baseline", factor, [label]) for factor, label in self.baseline.items()]
        for at in ("include", "exclude"):
            named += [(at, *item) for condition in getattr(self, at) for item in condition.items()]
        for at, factor, wanted in named:
            if factor not in self.factors:
                context = {"at": at, "name": factor, "hint": nearest_first(factor, self.factors)}
                raise PydanticCustomError("at", "no factor '{name}'; {hint}", context)
            labels = [level.label for level in self.factors[factor]]
            for label in wanted:
                if label not in labels:
                    context = {"at": at, "factor": factor, "name": label, "hint": nearest_first(label, labels)}
                    raise PydanticCustomError("at", "{factor} has no level '{name}'; {hint}", context)
        return self

    @model_validator(mode="after")
    def _plots_of_these_factors(self) -> Experiment:
        for index, plot in enumerate(self.outputs.plots or ()):
            for axis in ("x", "y"):
                name = getattr(plot, axis)
                if name is not None and name not in self.factors:
                    context = {"at": "outputs", "where": f"plots.{index}.{axis}", "name": name}
                    context["hint"] = nearest_first(name, self.factors)
                    raise PydanticCustomError("at", "{where}: no factor '{name}'; {hint}", context)
        return self

    @model_validator(mode="after")
    def _paper_of_these_factors(self) -> Experiment:
        if self.paper is None:
            return self
        if SUSTAINED in self.paper.metrics and self.paper.sustained is None:
            raise ValueError("a column or claim asks for `sustained`, and paper.sustained does not say of what")
        if self.paper.sustained is not None:
            over = self.paper.sustained.over
            if over not in self.factors:
                raise ValueError(f"paper.sustained.over: no factor {over!r}; {nearest_first(over, self.factors)}")
            for label in (level.label for level in self.factors[over]):
                if not _is_number(label):
                    raise ValueError(f"paper.sustained.over: {over} has the level {label!r}; each must be a number")
        return self

    @model_validator(mode="after")
    def _pairs(self) -> Experiment:
        counts = {name: len(levels) for name, levels in self.factors.items()}
        if self.grid == "paired" and len(set(counts.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise PydanticCustomError(
                "at", "paired factors need as many levels each: {told}", {"at": "grid", "told": told}
            )
        return self

    def combinations(self) -> list[dict[str, tuple[int, Level]]]:
        """Factor -> (index, level) of every cell, in the order of the file."""
        if self.grid == "paired":
            depth = max(map(len, self.factors.values()), default=1)
            chosen = [{name: (i, levels[i]) for name, levels in self.factors.items()} for i in range(depth)]
        else:
            chosen = [{}]
            for name, levels in self.factors.items():
                chosen = [{**before, name: item} for before in chosen for item in enumerate(levels)]
        return [cell for cell in chosen if self._runs({name: level.label for name, (_, level) in cell.items()})]

    def _runs(self, labels: Mapping[str, str]) -> bool:
        def meets(condition: Condition) -> bool:
            return all(labels[factor] in wanted for factor, wanted in condition.items())

        return (not self.include or any(map(meets, self.include))) and not any(map(meets, self.exclude))


def is_level(value: Any) -> bool:
    """Whether YAML gives a level with a label, and not a plain value."""
    return isinstance(value, dict) and "label" in value


def _is_number(label: str) -> bool:
    try:
        return math.isfinite(float(label))
    except ValueError:
        return False


def label_of(value: Any) -> str:
    """How tables name a plain value: as YAML writes it, a policy from a file by its class."""
    if isinstance(value, str) and ".py:" in value:
        return value.rpartition(":")[2]
    return str(value).lower() if isinstance(value, bool) else str(value)
