"""From a YAML file and key=value words to a checked experiment; a mistake is told with key, line and valid ones."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator
from yaml import MarkedYAMLError

from experiments.experiment import Experiment, is_level, label_of
from experiments.kernel_settings import KernelSettings
from experiments.paper import Paper
from experiments.settings import Settings, nearest_first
from experiments.workloads import WorkloadSettings
from research_engine.engine.config import OnFault
from research_engine.engine.reservation import Reservation
from research_engine.yaml_text import read_yaml, value_of

CONFIGS = Path(__file__).resolve().parent / "configs"
PAPERS = Path(__file__).resolve().parent / "papers"
QUOTED = r"'([^']*)'"
RECORDED = "sim_vs_real"
"""An experiment that runs nothing: its real half is recorded."""


class ConfigError(ValueError):
    """A user's mistake in a configuration: says where, what, and what would be right."""


class SLOSettings(Settings):
    """Limits in seconds that a good request keeps; those left out are not asked for."""

    ttft: float | None = Field(default=None, gt=0)
    tpot: float | None = Field(default=None, gt=0)
    e2e: float | None = Field(default=None, gt=0)


SIMULATED_BATCHED_TOKENS = 8192
"""Tokens a step of a simulation that names none: as a real GPU gets."""

OF_REAL_ENGINES = ("weight_packing", "kv_cache_dtype", "batch_invariant", "enforce_eager")
"""Options that a simulation refuses, since its cost models do not know them."""


class TrialSettings(Settings):
    """All that decides a trial but its seed: the options of an engine, named as in `EngineOptions`, and a workload.

    Args:
        model ... enforce_eager: see `research_engine.options.EngineOptions`; None takes its default. In a simulation
            overlap = None does as the engine did that the profile is of; on a roofline, whose host time is a guess, no
            step is scheduled ahead.
        executor: "simulated" computes nothing: steps take the time that a cost model gives them, on a virtual clock.
        gpu: of a simulation: a sheet out of `simulation.gpu_sheet.available_sheets()`, or the path of a .json one.
        cost_model: of a simulation: "roofline" of `gpu`, or "profiled:FILE", a profile by `research-engine profile`, or
            one that ships by its name ("profiled:llama3-8b-h200").
        force_profile: take a profile of another model, GPU or version all the same.
        tensor_parallel_size: of a simulation on the roofline: GPUs that the model is divided over.
        warmup_requests: requests of the workload served at once, whole prompts and a few tokens each, and thrown away
            before a process's first trial of a cell. None takes as many as the run serves at once; a simulation has
            nothing to warm up.
        workload: what arrives when.
        slo: for goodput; without one every completed request is good.
        explain: also write every decision of the policy with its reasons, to decisions.jsonl of the trial.
    """

    model: str = "smollm2-135m-instruct"
    scheduler: str = "chunked_prefill"
    scheduler_params: Mapping[str, Any] = Field(default_factory=dict)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = Field(default=None, ge=2)
    max_num_seqs: int = Field(default=256, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=16, ge=1)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_cache_memory: float | None = Field(default=None, gt=0)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    swap_space: float = Field(default=0.0, ge=0)
    num_host_blocks: int | None = Field(default=None, ge=0)
    max_num_queued: int = Field(default=0, ge=0)
    reservation: Reservation = "paged"
    on_fault: OnFault = "stop"
    schedule_limit: float = Field(default=1.0, gt=0)
    enable_prefix_caching: bool = True
    weight_packing: Literal["auto", "packed", "dequantized"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = "auto"
    trust_remote_code: bool = False
    overlap: bool | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False
    executor: Literal["torch", "simulated"] = "torch"
    gpu: str | None = None
    cost_model: str = Field(default="roofline", pattern=r"^(roofline|profiled:.+)$")
    force_profile: bool = False
    tensor_parallel_size: int = Field(default=1, ge=1)
    warmup_requests: int | None = Field(default=None, ge=0)
    workload: WorkloadSettings = WorkloadSettings()
    slo: SLOSettings | None = None
    explain: bool = False

    @model_validator(mode="after")
    def _possible(self) -> TrialSettings:
        budget, most = self.scheduler_params.get("token_budget"), self.max_num_batched_tokens
        if most is None and self.executor == "simulated":
            most = SIMULATED_BATCHED_TOKENS
        if isinstance(budget, int) and most is not None and budget > most:
            rule = f"is above max_num_batched_tokens = {most}: no step could hold such a chunk"
            raise ValueError(f"scheduler_params.token_budget = {budget} {rule}")
        simulates = self.gpu or self.cost_model != "roofline" or self.tensor_parallel_size > 1
        if self.executor == "torch" and (simulates or self.force_profile):
            rule = "set executor: simulated, or leave them out"
            raise ValueError(f"gpu, cost_model and tensor_parallel_size describe a simulation; {rule}")
        fields = type(self).model_fields
        if given := [n for n in OF_REAL_ENGINES if getattr(self, n) != fields[n].default and self.executor != "torch"]:
            raise ValueError(f"{given[0]}: no simulation honours it; leave it out, or set executor: torch")
        if self.executor == "simulated" and not (self.gpu or self.profile):
            both = "gpu (the name of a GPU sheet, such as h200), cost_model: profiled:FILE, or both"
            raise ValueError(f"executor: simulated needs {both}")
        return self

    @property
    def profile(self) -> str | None:
        """The file of a profiled cost model."""
        kind, _, file = self.cost_model.partition(":")
        if kind != "profiled":
            return None
        from research_engine.simulation.build import profile_path

        return str(profile_path(file))


@dataclass(frozen=True)
class Cell:
    """One combination of levels, complete and checked."""

    levels: Mapping[str, str]
    settings: TrialSettings | KernelSettings

    @property
    def label(self) -> str:
        own = self.settings
        return ", ".join(self.levels.values()) or (own.scheduler if isinstance(own, TrialSettings) else own.op)


SETTINGS: dict[str, type[TrialSettings] | type[KernelSettings]] = {"serving": TrialSettings, "kernels": KernelSettings}
"""What a trial is decided by, for each thing that an experiment measures."""


# Where things are written, for messages.

KeyPath = tuple[Any, ...]


class Origin:
    """Where each key of the raw configuration comes from: a line of the file, or a word of the command line."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[KeyPath, str] = {}

    def of(self, path: KeyPath) -> str:
        """The place of the longest known beginning of a path; union tags and the like in it are skipped."""
        best: KeyPath = ()
        for part in path:
            if (*best, part) in self.lines:
                best = (*best, part)
        return self.lines.get(best, self.file)


def _read(text: str, origin: Origin) -> dict[str, Any]:
    try:
        node, data = read_yaml(text)
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(f"{origin.file}{line}: no YAML: {_problem(error)}") from error
    if node is None or not isinstance(data, dict):
        raise ConfigError(f"{origin.file}: must be a mapping with {', '.join(Experiment.model_fields)}")
    for path, number in _keys(node, ()):
        if path in origin.lines:
            first = origin.lines[path]
            raise ConfigError(f"{origin.file}, line {number}: the key {path[-1]!r} is there twice, first in {first}")
        origin.lines[path] = f"{origin.file}, line {number}"
    return data


def _problem(error: yaml.YAMLError) -> str:
    """What is wrong, without the place."""
    told = (error.problem or error.context) if isinstance(error, MarkedYAMLError) else None
    return told or str(error)


def _keys(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = value_of(key) if isinstance(key, yaml.ScalarNode) else str(key)
            yield (*path, name), key.start_mark.line + 1
            yield from _keys(value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield (*path, index), value.start_mark.line + 1
            yield from _keys(value, (*path, index))


# Loading.


def available() -> dict[str, Path]:
    """Experiments that ship: name -> file. Reproductions are called papers/NAME."""
    return {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))} | {
        f"papers/{path.stem}": path for path in sorted(PAPERS.glob("*.yaml"))
    }


def shipped() -> list[str]:
    """Names of all that `--list` shows: experiments, reproductions that are no grid of trials, and the recorded one."""
    from experiments.papers.computed import COMPUTED  # it imports this module

    return [*available(), *COMPUTED, RECORDED]


def load_experiment(name: str, overrides: Sequence[str] = ()) -> tuple[Experiment, list[Cell]]:
    """Read an experiment, apply key=value words, and check every cell of its grid.

    Args:
        name: out of `available()`, or the path of a YAML file.
        overrides: `key=value`; a key is that of a setting in `base` (dotted), of a factor (its levels are replaced; one
            value or a list), `factors.KEY` for a new factor, or `name`, `description`, `seeds`, `baseline.FACTOR`,
            `outputs.KEY`. Values are YAML.

    Raises:
        ConfigError: unknown experiment, key, scheduler; a value out of range; with its line or word.
    """
    path = _find(name)
    origin = Origin(path.name)
    try:
        raw = _read(path.read_text(encoding="utf-8"), origin)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    raw.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).lstrip("._-") or "experiment")
    as_written = copy.deepcopy(raw) if overrides else {}
    for word in overrides:
        _override(raw, word, origin)
    _add_changes(raw, overrides)
    try:
        experiment = Experiment.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, origin, ())) from error
    cells = list(_cells(experiment, raw, origin))
    _check_schedulers(cells, origin)
    return _with_known_rows(experiment, cells, as_written, origin), cells


# Keys whose change makes no description wrong.
_UNTOLD = ("name", "description", "seeds", "repeats", "baseline", "outputs", "explain")


def _find(name: str) -> Path:
    known = available()
    if name in known:
        return known[name]
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"no file {name!r}")
    raise ConfigError(f"no experiment {name!r}; {nearest_first(name, shipped())}; or give the path of a YAML file")


def _override(raw: dict[str, Any], word: str, origin: Origin) -> None:
    """Put one key=value word into the raw configuration; mutates both arguments."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r}: expected key=value, such as workload.arrivals.rate=2")
    try:
        _, value = read_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{word!r}: the value is no YAML: {_problem(error)}") from error
    factors = raw.get("factors") or {}
    head, _, rest = key.partition(".")
    if key in factors or (head == "factors" and rest):
        path: KeyPath = ("factors", key if key in factors else rest)
        value = value if isinstance(value, list) else [value]
        _keep_baseline(raw, path[1], value)
    elif head in Experiment.model_fields and head != "base":
        path = (head, rest) if rest else (head,)
        value = [value] if key == "seeds" and not isinstance(value, list) else value
    else:
        path = ("base", *(key.split(".")[1:] if head == "base" else key.split(".")))
    _put(raw, path, value, word)
    origin.lines = {known: line for known, line in origin.lines.items() if known[: len(path)] != path}
    for depth in range(1, len(path) + 1):
        origin.lines.setdefault(path[:depth], f"command line, {word}")


def _add_changes(raw: dict[str, Any], overrides: Sequence[str]) -> None:
    """The description, a table's title, also says what the command line changed of the experiment; mutates `raw`."""
    heads = [word.partition("=")[0].partition(".")[0] for word in overrides]
    told = [word for word, head in zip(overrides, heads, strict=True) if head not in _UNTOLD]
    if told and raw.get("description") and "description" not in heads:
        raw["description"] = f"{raw['description']}; changed: {' '.join(told)}"


def _keep_baseline(raw: dict[str, Any], factor: str, levels: list[Any]) -> None:
    """A baseline that the command line's levels no longer hold is dropped: there is nothing left to compare with."""
    baseline = raw.get("baseline")
    labels = [label_of(level.get("label")) if is_level(level) else label_of(level) for level in levels]
    if isinstance(baseline, dict) and factor in baseline and label_of(baseline[factor]) not in labels:
        del baseline[factor]


def _put(data: Any, path: KeyPath, value: Any, where: str) -> None:
    for depth, part in enumerate(path[:-1]):
        inner = data.get(part)
        if inner is None:
            inner = data[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{where}: {'.'.join(map(str, path[: depth + 1]))} is {inner!r} and has no keys")
        data = inner
    data[path[-1]] = value


def _cells(experiment: Experiment, raw: dict[str, Any], origin: Origin) -> Iterator[Cell]:
    kind = SETTINGS[experiment.measures]
    combinations = experiment.combinations()
    if not combinations:
        raise ConfigError(f"{origin.of(('include',))}: include and exclude leave no cell of the grid")
    for chosen in combinations:
        settings = copy.deepcopy(dict(raw.get("base") or {}))
        places: dict[KeyPath, str] = {}
        for name, (index, level) in chosen.items():
            for key, value in level.set.items():
                path = tuple(key.split("."))
                where = origin.of(("factors", name, index))
                _put(settings, path, copy.deepcopy(value), where)
                places[path] = where
        _find_shipped_files(settings)
        try:
            yield Cell({name: level.label for name, (_, level) in chosen.items()}, kind.model_validate(settings))
        except ValidationError as error:
            raise ConfigError(_explain(error, origin, ("base",), places)) from error


def _find_shipped_files(settings: dict[str, Any]) -> None:
    """Policies and sheets that ship are named from the project's root; mutates them to be found from anywhere else."""
    root = CONFIGS.parent.parent
    for key in ("scheduler", "gpu"):
        value = settings.get(key)
        if not isinstance(value, str) or not value.startswith("experiments/"):
            continue
        file = value.rpartition(":")[0] if key == "scheduler" else value
        if not Path(file).exists() and (root / file).is_file():
            settings[key] = str(root / value)


def _check_schedulers(cells: Sequence[Cell], origin: Origin) -> None:
    import schedulers

    for cell in cells:
        settings = cell.settings
        if not isinstance(settings, TrialSettings):
            continue
        paths: list[KeyPath] = [("factors", "scheduler"), ("base", "scheduler")]
        try:
            policy = schedulers.create(settings.scheduler, **settings.scheduler_params)
        except ValueError as error:
            if not str(error).startswith("no "):  # the policy is there; its parameters are at fault
                paths = [*(("base", "scheduler_params", key) for key in settings.scheduler_params), *paths]
            where = next((origin.lines[path] for path in paths if path in origin.lines), origin.file)
            raise ConfigError(f"{where}: {error}") from error
        # an engine would say so when its trial begins
        if getattr(policy, "preemption", None) == "swap" and not (settings.num_host_blocks or settings.swap_space):
            rule = "preemption = 'swap' needs host blocks: set swap_space (GiB) or num_host_blocks"
            raise ConfigError(f"{origin.file}: {cell.label}: {rule}")


def _with_known_rows(
    experiment: Experiment, cells: Sequence[Cell], as_written: dict[str, Any], origin: Origin
) -> Experiment:
    """The experiment; rows of its paper's table that the command line took out of the grid are noted in `left_out`.

    Args:
        as_written: the raw configuration before the command line's words; empty where there were none.

    Raises:
        ConfigError: a figure or a claim of the paper names a row that no cell makes.
    """
    paper = experiment.paper
    if paper is None:
        return experiment
    rows = {metric: _rows(paper, metric, cells) for metric in paper.metrics}
    missing = [named for named in paper.rows_named() if named[2] not in (*rows[named[1]], *paper.left_out)]
    written = _cells_as_written(as_written) if missing else []
    for place, metric, row in missing:
        if row not in _rows(paper, metric, written):
            where, key = origin.of(("paper", *place)), ".".join(map(str, place))
            raise ConfigError(f"{where}: paper.{key}: no row {row!r}; {nearest_first(row, rows[metric])}")
    left_out = tuple(dict.fromkeys([*paper.left_out, *(row for _, _, row in missing)]))
    return experiment.model_copy(update={"paper": paper.model_copy(update={"left_out": left_out})})


def _rows(paper: Paper, metric: str, cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(paper.row_of(metric, cell.label, cell.levels) for cell in cells))


def _cells_as_written(raw: dict[str, Any]) -> list[Cell]:
    """Cells of a file without the command line's words; none where it is no experiment without them."""
    try:
        return list(_cells(Experiment.model_validate(raw), raw, Origin("")))
    except (ConfigError, ValidationError):
        return []


def _explain(
    error: ValidationError, origin: Origin, prefix: KeyPath, places: Mapping[KeyPath, str] | None = None
) -> str:
    """All mistakes that pydantic found, one a line, in our words."""
    lines = []
    for problem in error.errors(include_url=False):
        path: KeyPath = problem["loc"]
        context = problem.get("ctx", {})
        message = problem["msg"].removeprefix("Value error, ")
        value = problem["input"]
        if problem["type"] in ("unknown_key", "at"):
            path = (*path, context.get("key", context.get("at")))
        elif problem["type"] == "union_tag_invalid":
            path, value = (*path, context["discriminator"].strip("'")), context["tag"]
            message = f"no such value; {nearest_first(str(value), re.findall(QUOTED, context['expected_tags']))}"
        elif problem["type"] == "literal_error":
            message = f"no such value; {nearest_first(str(value), re.findall(QUOTED, context['expected']))}"
        shown = "" if isinstance(value, (dict, list)) else f" = {value!r}"
        name = "" if problem["type"] == "unknown_key" or not path else f"{'.'.join(map(str, path))}{shown}: "
        if not path:  # a rule about several keys; its message begins with the one at fault
            path = tuple(re.split(r"[^\w.]", message, maxsplit=1)[0].split("."))
        place = next((at for key, at in (places or {}).items() if _is_within(path, key)), None)
        place = place or origin.of((*prefix, *path))
        lines.append(f"{place}: {name}{message}")
    return "\n".join(lines)


def _is_within(path: KeyPath, key: KeyPath) -> bool:
    """Whether `key` is the path once parts that are no keys (tags of unions) are left out of it."""
    parts = iter(path)
    return all(part in parts for part in key)
