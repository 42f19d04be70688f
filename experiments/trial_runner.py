"""Runs trials one after another in one process: loads, checks, warms up, and keeps what the next trial can use."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.backend import Backend
from experiments.chosen_backend import ChosenBackend
from experiments.config import TrialSettings
from experiments.kernel_trial import check_kernel, run_kernel_trial
from experiments.plan import Trial
from experiments.trial import make_workload, run_trial, serving, warm_up
from experiments.workloads import Workload

_KEPT_TOKENS = 20_000_000  # of prompts, in workloads that later trials may serve again
_TELL_EVERY = 0.25  # seconds between two words on progress


class TrialRunner:
    """Runs trials; the model, workloads and what was warmed up stay from one to the next.

    Args:
        backend: what serving trials run on; as their settings say when None.
        on_progress: is told now and then how many requests, or runs of a kernel, have ended since, and what goes on.
        on_note: is told what the user should know of a workload, once each; what is about a file's content once ever.
        progress: show downloads.
    """

    def __init__(
        self,
        backend: Backend | None = None,
        *,
        on_progress: Callable[[int, str], None] = lambda count, text: None,
        on_note: Callable[[str], None] | None = None,
        progress: bool = True,
    ) -> None:
        self._backend = backend or ChosenBackend(progress=progress)
        self._on_progress, self._on_note = on_progress, on_note
        self._workloads: OrderedDict[tuple[str, int], Workload] = OrderedDict()
        self._noted: set[str] = set()
        self._warm: set[str] = set()

    def check(self, trials: Sequence[Trial]) -> None:
        """Every trial's model, workload and engine, before the first of them takes any time.

        Raises:
            ConfigError, WorkloadError, LoadError, OptionError: a mistake of the user.
        """
        checked = set()
        for trial in trials:
            if not isinstance(trial.settings, TrialSettings):
                check_kernel(trial.settings)
                continue
            own = trial.settings.model_dump_json(exclude={"slo", "explain", "scheduler", "scheduler_params"})
            if (own, trial.seed) in checked:
                continue
            checked.add((own, trial.seed))
            self._on_progress(0, f"checking {trial.name}")
            self._backend.prepare(trial.settings)
            self._note(self._workload(trial))

    def run(self, trial: Trial, directory: Path) -> dict[str, Any]:
        """One trial; returns its summary. Whatever goes wrong is raised, and leaves no directory."""
        begin = time.monotonic()
        if not isinstance(trial.settings, TrialSettings):
            self._on_progress(0, trial.name)
            summary = run_kernel_trial(trial, directory)
            self._on_progress(trial.size, trial.name)
            return summary
        self._on_progress(0, f"{trial.name}: loading")
        self._backend.prepare(trial.settings)
        workload = self._workload(trial)
        without = {"workload", "slo", "explain", "warmup_requests"}
        identity = trial.settings.model_dump_json(exclude=without)
        if identity not in self._warm:
            self._on_progress(0, f"{trial.name}: warming up")
            warm_up(trial.settings, workload, self._backend)
            self._warm.add(identity)
        counter = _Counter(self._on_progress, trial.name)
        summary = run_trial(trial, workload, self._backend, directory, counter.add, begin)
        counter.tell()
        return summary

    def _note(self, workload: Workload) -> None:
        if self._on_note is None:
            return
        for warning in workload.warnings:
            if warning in self._noted:
                continue
            self._noted.add(warning)
            if workload.notice is None or warning != workload.notice.text:
                self._on_note(warning)
            elif workload.notice.is_news():
                self._on_note(f"{warning} (said once of this file; the summary.json of every trial says it, too)")

    def _workload(self, trial: Trial) -> Workload:
        """The very same requests for every trial of the key; limits of the engine are part of it, being checked."""
        own = serving(trial)
        limits = (own.model, own.max_model_len, own.num_blocks, own.block_size, own.max_num_seqs, own.kv_cache_memory)
        key = (f"{own.workload.model_dump_json()} {limits}", trial.seed)
        if key not in self._workloads:
            self._workloads[key] = make_workload(trial, self._backend)
        self._workloads.move_to_end(key)
        while len(self._workloads) > 1 and sum(map(_tokens, self._workloads.values())) > _KEPT_TOKENS:
            self._workloads.popitem(last=False)
        return self._workloads[key]


def _tokens(workload: Workload) -> int:
    return int(workload.statistics["prompt_tokens"])


class _Counter:
    """Adds up what has ended, and tells it not too often."""

    def __init__(self, tell: Callable[[int, str], None], name: str) -> None:
        self._tell, self._name = tell, name
        self._count, self._told = 0, time.monotonic()
        tell(0, name)

    def add(self, count: int) -> None:
        self._count += count
        if self._count and time.monotonic() - self._told >= _TELL_EVERY:
            self.tell()

    def tell(self) -> None:
        self._tell(self._count, self._name)
        self._count, self._told = 0, time.monotonic()
