"""Runs an experiment's trials into a run directory: resumes what is there, retries what failed, survives Ctrl-C."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.analysis.cells import VERDICTS
from experiments.backend import Backend
from experiments.config import SETTINGS, Cell, ConfigError
from experiments.environment import environment
from experiments.experiment import Experiment
from experiments.launcher import Failure, InTurn, Launcher
from experiments.plan import Trial, code_version, trials_of
from experiments.processes import Processes
from experiments.storage import InUseError, read_summary, sole_writer, write_json, write_text

ATTEMPTS = 2  # of a trial that fails


@dataclass
class RunReport:
    """How a run went.

    Attributes:
        directory: where everything is.
        planned, reused, finished: trials in all; finished before; finished now.
        failed: trial -> why, for those that failed again when they were retried.
        interrupted: what was under way when Ctrl-C came, or None.
    """

    directory: Path
    planned: int
    reused: int = 0
    finished: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: str | None = None


def run_experiment(
    experiment: Experiment,
    cells: Sequence[Cell],
    directory: Path,
    *,
    console: Console,
    backend: Backend | None = None,
    jobs: int = 1,
    launcher: Launcher | None = None,
) -> RunReport:
    """Run what is missing of an experiment.

    Trials that the directory holds already, by key, are not run again. Everything is written atomically, so an
    interruption or a full disk loses the trials in flight alone. A trial that fails is run once more at the end; if it
    fails again, failures.json says why, and tables show the hole.

    Args:
        experiment, cells: from `load_experiment`.
        directory: of the run; made if need be.
        console: for progress and messages.
        backend: what trials run on, in this process; a process of their own and what their settings say when None.
        jobs: processes at once.
        launcher: where trials run, in place of the two.

    Raises:
        ConfigError, WorkloadError, LoadError, OptionError: a mistake of the user, found before any trial; the
            directory is another run's at work, or holds files that no run wrote.
        OSError: no space is left, among others.
    """
    trials = trials_of(experiment, cells)
    report = RunReport(directory, len(trials))
    is_new = not directory.exists()
    launcher = launcher or (Processes(jobs) if backend is None else InTurn(backend))
    try:
        with sole_writer(directory):
            _check_own(directory)
            _write_head(experiment, cells, trials, directory)
            missing = [trial for trial in trials if read_summary(directory / "trials" / trial.directory_name) is None]
            report.reused = len(trials) - len(missing)
            if report.reused:
                console.print(f"{report.reused} of {len(trials)} trials are finished already and are not run again")
            if jobs > 1 and missing:
                note = f"{jobs} trials at once share this machine and disturb each other's times; measure with --jobs 1"
                console.print(f"[yellow]note:[/] {note}")
            if missing:
                _run(missing, directory, report, console, launcher)
    except InUseError as error:
        raise ConfigError(str(error)) from error
    except BaseException:
        if is_new and not (directory / "trials").exists():  # nothing ran: leave no directory behind a mistake
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return report


def _run(trials: list[Trial], directory: Path, report: RunReport, console: Console, launcher: Launcher) -> None:
    """Checks, runs, retries; mutates the report."""
    failures: dict[str, Failure] = {}
    with _Screen(console, trials, report) as screen:
        try:
            launcher.check(trials, screen)
            for attempt in range(1, ATTEMPTS + 1):
                launcher.run(trials, directory, screen)
                failures = {trial.directory_name: failure for trial, failure in screen.failures}
                trials = [trial for trial, _ in screen.failures]
                if not trials:
                    break
                if attempt < ATTEMPTS:
                    console.print(f"{len(trials)} failed and {'is' if len(trials) == 1 else 'are'} tried once more")
                    screen.again()
        except KeyboardInterrupt:
            report.interrupted = screen.under_way
        finally:
            launcher.close()
    report.failed = {trial.name: failure.reason for trial, failure in screen.failures}
    told = {name: {"reason": failure.reason, "details": failure.details} for name, failure in failures.items()}
    if told:
        write_json(directory / "failures.json", told)
    else:
        (directory / "failures.json").unlink(missing_ok=True)


def _check_own(directory: Path) -> None:
    """Raises ConfigError: a head would go over files that no run wrote; trials.json is the first that a run writes."""
    if (directory / "trials.json").exists():
        return
    for name in ("config.yaml", "environment.json"):
        if (directory / name).exists():
            raise ConfigError(f"out = {directory}: holds a {name} that no run wrote; choose another directory")


def _write_head(experiment: Experiment, cells: Sequence[Cell], trials: Sequence[Trial], directory: Path) -> None:
    """config.yaml (which runs the same experiment again), environment.json and trials.json."""
    resolved = experiment.model_dump(mode="json")
    try:
        resolved["base"] = SETTINGS[experiment.measures].model_validate(experiment.base).model_dump(mode="json")
    except ValueError:  # the base is complete only together with a factor's levels
        resolved["base"] = dict(experiment.base)
    order = {cell.label: index for index, cell in enumerate(cells)}
    plan = [{"cell": t.cell, "levels": dict(t.levels), "seed": t.seed, "repeat": t.repeat, "key": t.key,
             "directory": t.directory_name}
            for t in sorted(trials, key=lambda trial: (order[trial.cell], trial.repeat))]  # fmt: skip
    write_json(directory / "trials.json", plan)
    write_text(directory / "config.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    write_json(directory / "environment.json", environment() | {"code": code_version()})


class _Screen:
    """Progress in the terminal: a bar with the time that is left, a line for every trial that ends. See `Events`."""

    def __init__(self, console: Console, trials: Sequence[Trial], report: RunReport) -> None:
        self._console, self._report = console, report
        self._total, self._begin = len(trials), time.monotonic()
        self.failures: list[tuple[Trial, Failure]] = []
        self.under_way = "the first trial"
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                   TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        self._bar = Progress(*columns, console=console, transient=True, refresh_per_second=2)  # seldom: it disturbs
        self._task = self._bar.add_task("starting", total=sum(trial.size for trial in trials))

    def __enter__(self) -> _Screen:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def again(self) -> None:
        """Before failed trials run once more."""
        self._bar.update(self._task, completed=0, total=sum(trial.size for trial, _ in self.failures))
        self.failures = []

    def progress(self, count: int, text: str) -> None:
        self.under_way = text.partition(": ")[0]
        self._bar.update(self._task, advance=count, description=text)

    def note(self, text: str) -> None:
        self._console.print("[yellow]note:[/] ", end="")
        self._console.print(text, markup=False)

    def finished(self, trial: Trial, summary: dict[str, Any]) -> None:
        self._report.finished += 1
        done = self._report.finished
        left = (time.monotonic() - self._begin) / done * (self._total - done)
        clock = " of real time" if _is_virtual(summary) else ""
        still = f"; {done} of {self._total} trials, about {_duration(left)}{clock} left" if done < self._total else ""
        self._console.print(f"{trial.name}: {_outcome(summary)}{still}", markup=False, soft_wrap=True)

    def failed(self, trial: Trial, failure: Failure) -> None:
        self.failures.append((trial, failure))
        self._console.print("[red]failed:[/] ", end="")
        self._console.print(f"{trial.name}: {failure.reason}", markup=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _outcome(summary: dict[str, Any]) -> str:
    numbers, marks = summary["metrics"], "".join(f", {mark}" for mark in VERDICTS if summary[mark])
    if "kernel" in summary:
        median, share = numbers["kernel_time"]["p50"], numbers["roofline_share"]
        return f"{1e6 * median:.1f} us, {100 * share:.0f} % of the roofline{marks}"
    clock, second = (" of virtual time", "virtual second") if _is_virtual(summary) else ("", "s")
    return (
        f"{numbers['num_completed']} of {numbers['num_requests']} requests in {numbers['duration']:.1f} s{clock}, "
        f"{numbers['output_throughput']:.0f} output tokens/{second}{marks}"
    )


def _is_virtual(summary: dict[str, Any]) -> bool:
    """Whether the trial's own times are those of a virtual clock, beside which the wall's has to be named."""
    return bool(summary["kind"] == "simulated")
