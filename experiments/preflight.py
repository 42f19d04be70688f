"""What can be told of an experiment without loading anything: mistakes, and what running it would cost."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.config import Cell, ConfigError, TrialSettings
from experiments.kernel_settings import KernelSettings
from experiments.kernel_trial import check_kernel
from experiments.plan import Trial, directory_words
from experiments.storage import read_timing
from experiments.workloads import build_workload

_SAMPLE = 32  # requests of a trial that a simulation is timed with
_SAMPLE_VOCABULARY = 1000


def check_names(cells: Sequence[Cell]) -> None:
    """Models, GPU sheets, profiles and traces that are named must be there, as far as no download is needed to tell.

    Raises:
        ConfigError, LoadError, WorkloadError: naming what is wrong, nearest valid ones first.
    """
    from research_engine.simulation.gpu_sheet import load_sheet

    for settings in {cell.settings.model_dump_json(): cell.settings for cell in cells}.values():
        if not isinstance(settings, TrialSettings):
            continue
        _check_model(settings.model)
        settings.workload.files()
        if settings.gpu is not None:
            try:
                load_sheet(settings.gpu)
            except ValueError as error:
                raise ConfigError(f"gpu: {error}") from error
        if settings.profile is not None and not Path(settings.profile).expanduser().is_file():
            raise ConfigError(f"cost_model: no file {settings.profile!r}")


def check_devices(cells: Sequence[Cell]) -> None:
    """The devices that trials ask for must be on this machine, with kernels for the dtype and the path.

    Raises:
        ConfigError, OptionError: naming what is not there.
    """
    from research_engine.options import choose_device, choose_dtype

    for settings in {cell.settings.model_dump_json(): cell.settings for cell in cells}.values():
        if isinstance(settings, KernelSettings):
            check_kernel(settings)
        elif settings.executor != "simulated":
            choose_dtype(settings.dtype, choose_device(settings.device))


def unchecked(cells: Sequence[Cell], *, devices: bool) -> list[str]:
    """What a dry run does not look for, in words; a run looks for it before its first trial.

    Args:
        cells: of the experiment.
        devices: whether `check_devices` was asked.
    """
    serving = [cell.settings for cell in cells if isinstance(cell.settings, TrialSettings)]
    remote = sorted({own.model for own in serving if _is_remote(own.model)})
    words = [] if devices else ["the devices of the nodes"]
    words += [f"whether {model} can be had, since nothing is downloaded" for model in remote]
    return [*words, "whether every request fits its engine"] if serving else words


def _is_remote(name: str) -> bool:
    """Whether nothing on this machine tells that there is such a model."""
    from research_engine.loading.source import ALIASES

    named = name in ALIASES or name.startswith(("pypi:", "modelscope:")) or re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    is_path = name.startswith((".", "~")) or name.endswith((".gguf", ".safetensors")) or Path(name).exists()
    return bool(named) and not is_path


def _check_model(name: str) -> None:
    from research_engine.loading import resolve_model

    if not _is_remote(name):
        resolve_model(name, progress=False)


@dataclass(frozen=True)
class Cost:
    """What a trial takes.

    Attributes:
        seconds: None where nothing is known.
        basis: how they are known, for the user.
    """

    seconds: float | None
    basis: str


def cost_of(trial: Trial, directory: Path | None, scale: float | None) -> Cost:
    """What running a trial takes, or took.

    Args:
        trial: whose.
        directory: of the run, where a finished trial of the same cell may lie.
        scale: seconds a simulated request, from `seconds_per_request`.
    """
    own = trial.settings
    if directory is not None:
        took = [
            read_timing(path) for path in sorted((directory / "trials").glob(f"{directory_words(trial.cell)}-seed*"))
        ]
        known = [seconds for seconds in took if seconds is not None]
        if known:
            return Cost(sum(known) / len(known), "as finished trials of its cell took")
    if not isinstance(own, TrialSettings):
        return Cost(None, f"{own.repeats} runs of {own.op} {own.shape}")
    if own.executor == "simulated":
        if scale is None:
            return Cost(None, f"{own.workload.num_requests} requests in virtual time")
        return Cost(scale * own.workload.num_requests, f"of real time, by its first {_SAMPLE} requests")
    rate = own.workload.arrivals.rate
    if own.workload.arrivals.process in ("poisson", "gamma", "constant", "on_off", "diurnal") and rate is not None:
        return Cost(own.workload.num_requests / rate, "at least: the arrivals alone")
    return Cost(None, f"{own.workload.num_requests} requests as fast as the machine serves them")


def seconds_per_request(trials: Sequence[Trial]) -> float | None:
    """Host seconds that simulating a request takes on this machine, from the beginning of the first simulated trial
    whose model needs no download.
    """
    from experiments.simulated_backend import SimulatedBackend
    from research_engine.engine.driver import replay

    for trial in trials:
        own = trial.settings
        if not isinstance(own, TrialSettings) or _is_remote(own.model):
            continue
        if own.executor == "simulated" and own.workload.conversations is None:
            backend = SimulatedBackend(progress=False)
            backend.prepare(own)
            workload = build_workload(own.workload, trial.seed, vocab_size=_SAMPLE_VOCABULARY)
            first = workload.arrivals[:_SAMPLE]
            engine = backend.engine(own, trial.seed)
            begin = time.perf_counter()
            replay(engine, first)
            return (time.perf_counter() - begin) / len(first)
    return None
