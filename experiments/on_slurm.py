"""Trials as the tasks of a Slurm job array, through submitit; the run directory lies on a file system of all nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from experiments.config import ConfigError
from experiments.launcher import Events, Failure
from experiments.plan import Trial
from experiments.storage import read_summary
from experiments.trial_runner import TrialRunner
from research_engine.yaml_text import read_yaml

_LOOK_EVERY = 2.0  # seconds between two looks at the queue


class SlurmArray:
    """See `Launcher`. Waits for the array; Ctrl-C stops the waiting and leaves the jobs to Slurm.

    Args:
        cluster: of submitit: slurm, local (a process each) or debug (in this process).
        parameters: of submitit's executor, such as slurm_partition, timeout_min, gpus_per_node.

    Raises:
        ConfigError: submitit is not installed.
    """

    def __init__(self, cluster: str = "slurm", parameters: Mapping[str, Any] | None = None) -> None:
        try:
            import submitit
        except ImportError as error:
            raise ConfigError("--slurm: submitit is not installed: pip install 'research_engine[slurm]'") from error
        self._submitit = submitit
        self._cluster, self._parameters = cluster, dict(parameters or {})

    @classmethod
    def of(cls, words: str) -> SlurmArray:
        """From key=value words with commas between; `cluster` is the executor's, the others its parameters."""
        given: dict[str, Any] = {"timeout_min": 60}
        for word in filter(None, words.split(",")):
            key, equals, value = word.partition("=")
            if not equals:
                raise ConfigError(f"--slurm: {word!r}: expected key=value, such as slurm_partition=gpu")
            try:
                _, given[key] = read_yaml(value)
            except yaml.YAMLError as error:
                raise ConfigError(f"--slurm: {word!r}: the value is no YAML: {error}") from error
        return cls(str(given.pop("cluster", "slurm")), given)

    def check(self, trials: Sequence[Trial], events: Events) -> None:
        """See `Launcher`. In this process, on the machine that submits."""
        TrialRunner(on_progress=events.progress, on_note=events.note).check(trials)

    def run(self, trials: Sequence[Trial], directory: Path, events: Events) -> None:
        """See `Launcher`."""
        try:
            executor = self._submitit.AutoExecutor(folder=directory / "slurm", cluster=self._cluster)
            executor.update_parameters(name=f"research-{directory.name}", **self._parameters)
            jobs = executor.map_array(_run, list(trials), [directory.resolve()] * len(trials))
        except (RuntimeError, NameError, ValueError, TypeError, OSError) as error:
            raise ConfigError(f"--slurm: {error}") from error
        events.note(
            f"{len(jobs)} jobs on {self._cluster}, the first is {jobs[0].job_id}; logs are in {directory / 'slurm'}"
        )
        waiting = dict(zip(jobs, trials, strict=True))
        while waiting:
            for job in [job for job in waiting if job.done()]:
                _tell(job, waiting.pop(job), directory, events)
            if waiting:
                events.progress(0, f"{len(waiting)} jobs to go")
                time.sleep(_LOOK_EVERY)

    def close(self) -> None:
        """The jobs are Slurm's."""


def _tell(job: Any, trial: Trial, directory: Path, events: Events) -> None:
    error = job.exception()  # a job of submitit's debug executor runs here
    summary = read_summary(directory / "trials" / trial.directory_name)
    if summary is None:
        lines = str(error).strip().splitlines() if error is not None else ["the job left nothing"]
        events.failed(trial, Failure(lines[-1], str(error)))
        return
    events.progress(trial.size, trial.name)
    events.finished(trial, summary)


def _run(trial: Trial, directory: Path) -> None:
    """On a node."""
    TrialRunner(progress=False).run(trial, directory / "trials" / trial.directory_name)
