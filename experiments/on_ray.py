"""Trials as tasks of a Ray cluster; their files come back over the wire, so that nodes need no common file system."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.config import ConfigError
from experiments.environment import ROOT
from experiments.launcher import Events, Failure, failure_of
from experiments.plan import Trial
from experiments.storage import new_directory
from experiments.trial_runner import TrialRunner
from experiments.workloads.trace_files import TRACES


class RayCluster:
    """See `Launcher`. Every node has the project (under the same path, or installed), its models and its traces.

    Args:
        address: of the cluster; `auto` finds the one that this machine belongs to, `local` starts one here.
        jobs: workers of a local cluster.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str, jobs: int = 1) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("--ray: Ray is not installed: pip install 'research_engine[ray]'") from error
        self._ray = ray
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths)}
        if os.environ.get(TRACES):
            variables[TRACES] = os.environ[TRACES]
        options: dict[str, Any] = {"num_cpus": jobs, "include_dashboard": False} if address == "local" else {}
        try:
            ray.init(address=address, runtime_env={"env_vars": variables}, log_to_driver=False, configure_logging=False,
                     **options)  # fmt: skip
        except Exception as error:  # Ray raises plain Exception when a node does not start in time
            raise ConfigError(f"--ray {address}: {error}") from error

    def check(self, trials: Sequence[Trial], events: Events) -> None:
        """See `Launcher`. On a node, where the models are; nothing is kept for the trials."""
        cause = self._ray.get(self._ray.remote(_check).remote(list(trials)))
        if cause is not None:
            raise cause

    def run(self, trials: Sequence[Trial], directory: Path, events: Events) -> None:
        """See `Launcher`."""
        task = self._ray.remote(max_retries=0, num_gpus=_gpus(self._ray))(_run)
        pending = {task.remote(trial): trial for trial in trials}
        while pending:
            (ready, *_), _ = self._ray.wait(list(pending), num_returns=1)
            trial = pending.pop(ready)
            try:
                summary, files = self._ray.get(ready)
            except self._ray.exceptions.RayTaskError as error:
                events.failed(trial, failure_of(error.cause if isinstance(error.cause, Exception) else error))
            except self._ray.exceptions.RayError as error:  # the worker died
                events.failed(trial, Failure(f"its worker died: {str(error).splitlines()[0]}", str(error)))
            else:
                with (
                    new_directory(directory / "trials" / trial.directory_name) as fresh,
                    tarfile.open(fileobj=io.BytesIO(files)) as archive,
                ):
                    archive.extractall(fresh, filter="data")
                events.progress(trial.size, f"{len(pending)} trials to go")
                events.finished(trial, summary)

    def close(self) -> None:
        """Leaves the cluster; tasks that it still has are dropped."""
        self._ray.shutdown()


def _gpus(ray: Any) -> int:
    """One for each trial where the cluster has any."""
    return 1 if ray.cluster_resources().get("GPU") else 0


def _check(trials: list[Trial]) -> Exception | None:
    try:
        TrialRunner(progress=False).check(trials)
    except ValueError as error:
        return type(error)(str(error))
    return None


def _run(trial: Trial) -> tuple[dict[str, Any], bytes]:
    """The summary, and the trial's directory as a tar file."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "trial"
        summary = _runner().run(trial, place)
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            for path in sorted(place.iterdir()):
                archive.add(path, path.name)
    return summary, out.getvalue()


_kept: list[TrialRunner] = []


def _runner() -> TrialRunner:
    """One for each worker process, so that it loads a model once."""
    if not _kept:
        _kept.append(TrialRunner(progress=False))
    return _kept[0]
