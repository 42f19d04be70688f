"""Runs an experiment's trials into a run directory: resumes what is there, survives Ctrl-C, shows progress."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments.analysis.tables import VERDICTS
from experiments.backend import Backend, model_identity
from experiments.chosen_backend import ChosenBackend
from experiments.config import Cell, ConfigError, Experiment, TrialSettings
from experiments.environment import environment, usable_cores
from experiments.plan import Trial, code_version, trials_of
from experiments.storage import InUseError, read_summary, sole_writer, write_json, write_text
from experiments.trial import make_workload, run_trial, warm_up
from experiments.workloads import Workload
from research_engine.engine.errors import EngineError


@dataclass
class RunReport:
    """How a run went.

    Attributes:
        directory: where everything is.
        planned, reused, finished: trials in all; finished before; finished now.
        failed: trial -> why.
        interrupted: the trial that Ctrl-C ended, or None.
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
) -> RunReport:
    """Run what is missing of an experiment, then write its tables and plots.

    Trials that the directory holds already, by key, are not run again. Everything is written atomically, so an
    interruption loses the trial in flight alone.

    Args:
        experiment, cells: from `load_experiment`.
        directory: of the run; made if need be.
        console: for progress and messages.
        backend: what trials run on; as their settings say when None. Only with jobs == 1.
        jobs: processes at once.

    Raises:
        ConfigError, WorkloadError, LoadError, OptionError: a mistake of the user, found before the first trial of its
        model.
    """
    trials = trials_of(experiment, cells)
    report = RunReport(directory, len(trials))
    is_new = not directory.exists()
    try:
        with sole_writer(directory):
            _write_head(experiment, cells, trials, directory)
            missing = [trial for trial in trials if read_summary(directory / "trials" / trial.directory_name) is None]
            report.reused = len(trials) - len(missing)
            if report.reused:
                console.print(f"{report.reused} of {len(trials)} trials are finished already and are not run again")
            if missing and jobs > 1:
                _run_parallel(missing, directory, report, console, jobs)
            elif missing:
                _run_in_turn(missing, directory, report, console, backend or ChosenBackend())
    except InUseError as error:
        raise ConfigError(str(error)) from error
    except BaseException:
        if is_new and not (directory / "trials").exists():  # nothing ran: leave no directory behind a mistake
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return report


def _write_head(experiment: Experiment, cells: Sequence[Cell], trials: Sequence[Trial], directory: Path) -> None:
    """config.yaml (which runs the same experiment again), environment.json and trials.json."""
    resolved = experiment.model_dump(mode="json")
    try:
        resolved["base"] = TrialSettings.model_validate(experiment.base).model_dump(mode="json")
    except ValueError:  # the base is complete only together with a factor's levels
        resolved["base"] = dict(experiment.base)
    write_text(directory / "config.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    order = {cell.label: index for index, cell in enumerate(cells)}
    plan = [{"cell": t.cell, "levels": dict(t.levels), "seed": t.seed, "key": t.key, "directory": t.directory_name}
            for t in sorted(trials, key=lambda trial: order[trial.cell])]  # fmt: skip
    write_json(directory / "trials.json", plan)
    write_json(directory / "environment.json", environment() | {"code": code_version()})


def _run_in_turn(
    trials: Sequence[Trial], directory: Path, report: RunReport, console: Console, backend: Backend
) -> None:
    """Runs the trials one after the other in this process; mutates the report."""
    workloads: dict[tuple[str, int], Workload] = {}
    warnings: set[str] = set()
    checked: set[tuple[object, ...]] = set()
    total = sum(trial.settings.workload.num_requests for trial in trials)
    with _progress(console, total) as advance:
        for number, trial in enumerate(trials, 1):
            name = f"{trial.cell}, seed {trial.seed}"
            done = 0

            def count(finished: int, name: str = name, number: int = number) -> None:
                nonlocal done
                done += finished
                advance(finished, f"{number}/{len(trials)} {name}")

            try:
                identity = model_identity(trial.settings)
                if identity not in checked:
                    advance(0, f"loading {trial.settings.model}")
                    backend.prepare(trial.settings)
                    same = [other for other in trials if model_identity(other.settings) == identity]
                    for other in same:  # all of a model's workloads, before its first trial takes any time
                        key = _workload_key(other)
                        if key not in workloads:
                            workloads[key] = make_workload(other, backend)
                        _tell_warnings(workloads[key], warnings, console)
                    advance(0, "warming up")
                    warm_up(trial.settings, workloads[_workload_key(trial)], backend)
                    checked.add(identity)
                advance(0, f"{number}/{len(trials)} {name}")
                workload = workloads[_workload_key(trial)]
                summary = run_trial(trial, workload, backend, directory / "trials" / trial.directory_name, count)
                console.print(_one_line(summary))
                report.finished += 1
            except KeyboardInterrupt:
                report.interrupted = name
                return
            except EngineError as error:
                report.failed[name] = str(error)
                advance(trial.settings.workload.num_requests - done, name)
                console.print(f"[red]failed:[/] {name}: ", end="")
                console.print(str(error), markup=False)


def _workload_key(trial: Trial) -> tuple[str, int]:
    """Trials of the same key serve the very same requests; limits are part of it, being checked with them."""
    own = trial.settings
    limits = (own.model, own.max_model_len, own.num_blocks, own.block_size)
    return f"{own.workload.model_dump_json()} {limits}", trial.seed


def _tell_warnings(workload: Workload, told: set[str], console: Console) -> None:
    for warning in workload.warnings:
        if warning not in told:
            told.add(warning)
            console.print("[yellow]note:[/] ", end="")
            console.print(warning, markup=False)


def _one_line(summary: dict[str, Any]) -> str:
    numbers = summary["metrics"]
    marks = "".join(f", {mark}" for mark in VERDICTS if summary[mark])
    return (
        f"{summary['cell']}, seed {summary['seed']}: {numbers['num_completed']} of {numbers['num_requests']} requests "
        f"in {numbers['duration']:.1f} s, {numbers['output_throughput']:.0f} output tokens/s{marks}"
    )


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields advance(requests_finished, what_is_going_on)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"),
               TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=2
    ) as bar:  # seldom: it disturbs timings
        task = bar.add_task("starting", total=total)
        yield lambda finished, text: bar.update(task, advance=finished, description=text)


# Several processes.


def _run_parallel(trials: Sequence[Trial], directory: Path, report: RunReport, console: Console, jobs: int) -> None:
    """Runs the trials in `jobs` processes, each with its own model; mutates the report."""
    note = f"{jobs} trials at once share this machine and disturb each other's times; measure times with --jobs 1"
    console.print(f"[yellow]note:[/] {note}")
    threads = max(1, usable_cores() // jobs)
    pool = ProcessPoolExecutor(
        min(jobs, len(trials)), multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(threads,)
    )
    total = sum(trial.settings.workload.num_requests for trial in trials)
    try:
        with _progress(console, total) as advance:
            pending = {pool.submit(_work, trial, directory): trial for trial in trials}
            while pending:
                for future in wait(pending, return_when=FIRST_COMPLETED).done:
                    trial = pending.pop(future)
                    name = f"{trial.cell}, seed {trial.seed}"
                    try:
                        console.print(_one_line(future.result()))
                        report.finished += 1
                    except EngineError as error:
                        report.failed[name] = str(error)
                    advance(trial.settings.workload.num_requests, f"{len(pending)} trials to go")
    except KeyboardInterrupt:
        report.interrupted = f"{len(pending)} trials"
        for process in list((pool._processes or {}).values()):
            process.terminate()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker_backend: ChosenBackend | None = None


def _start_worker(threads: int) -> None:
    """Ctrl-C is the parent's affair; threads are set before torch and the kernels read them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["OMP_NUM_THREADS"] = str(threads)


def _work(trial: Trial, directory: Path) -> dict[str, Any]:
    global _worker_backend
    if _worker_backend is None:
        _worker_backend = ChosenBackend(progress=False)
    backend = _worker_backend
    backend.prepare(trial.settings)
    workload = make_workload(trial, backend)
    warm_up(trial.settings, workload, backend)
    return run_trial(trial, workload, backend, directory / "trials" / trial.directory_name, lambda finished: None)
