"""Which trials an experiment has, and the key of each: the hash of its settings, its seed and the code that runs it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.backend import model_identity
from experiments.config import Cell, TrialSettings
from experiments.experiment import Experiment
from experiments.kernel_settings import KernelSettings, source_digest
from experiments.workloads.streams import stream
from research_engine.plugins import source_files

ROOT = Path(__file__).resolve().parent.parent
_CODE = (
    "research_engine/**/*.py",
    "research_engine/simulation/gpus/*.json",
    "csrc/**/*.*",
    "schedulers/**/*.py",
    "experiments/*.py",
    "experiments/workloads/*.*",
)


@dataclass(frozen=True)
class Trial:
    """One run of one cell with one seed; `repeat` counts runs of the same."""

    cell: str
    levels: Mapping[str, str]
    settings: TrialSettings | KernelSettings
    seed: int
    key: str
    repeat: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.cell}, seed {self.seed}" + (f", repeat {self.repeat}" if self.repeat else "")

    @property
    def size(self) -> int:
        """What progress is counted in: requests, or runs of a kernel."""
        own = self.settings
        return own.workload.num_requests if isinstance(own, TrialSettings) else own.repeats

    @property
    def directory_name(self) -> str:
        """Readable and unique: what varied, the seed, the key's beginning."""
        words = directory_words(self.cell)
        again = f"-r{self.repeat}" if self.repeat else ""
        return f"{words}-seed{self.seed}{again}-{self.key[:10]}"


def directory_words(cell: str) -> str:
    """A cell's label as directories begin with it: in the letters of any language, short, and never hidden."""
    return re.sub(r"[^\w.]+", "-", cell)[:48].strip("-.") or "cell"


def trials_of(experiment: Experiment, cells: Sequence[Cell]) -> list[Trial]:
    """Every cell with every seed, in the order in which they run.

    Models outermost, since loading one takes long; then repeats and seeds, so that an early end leaves whole
    comparisons; within them the cells, in random order unless the experiment says otherwise (a randomised block
    design: what drifts with time meets every cell alike).
    """
    trials = []
    for repeat in range(experiment.repeats):
        for seed in experiment.seeds:
            block = list(cells)
            if experiment.order == "random":
                order = stream(seed, f"order of repeat {repeat}").permutation(len(block)).tolist()
                block = [block[index] for index in order]
            trials += [
                Trial(cell.label, cell.levels, cell.settings, seed, trial_key(cell.settings, seed, repeat), repeat)
                for cell in block
            ]
    models = list(dict.fromkeys(loaded_identity(cell.settings) for cell in cells))
    return sorted(trials, key=lambda trial: models.index(loaded_identity(trial.settings)))


def loaded_identity(settings: TrialSettings | KernelSettings) -> tuple[object, ...]:
    """Trials of the same one run on the same loaded model; kernels have none."""
    return model_identity(settings) if isinstance(settings, TrialSettings) else ("kernels", settings.device)


def trial_key(settings: TrialSettings | KernelSettings, seed: int, repeat: int = 0) -> str:
    """SHA-256 over the settings, the seed, the code, and the files that settings name (policy, GPU sheet, profile,
    traces).

    Raises:
        WorkloadError: a file of the workload is missing.
    """
    content: dict[str, object] = {"settings": settings.model_dump(mode="json"), "seed": seed, "code": code_version()}
    if repeat:
        content["repeat"] = repeat
    if isinstance(settings, TrialSettings):
        content |= _named_files(settings)
    elif source := settings.source:
        content["source"] = source_digest(source)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _named_files(settings: TrialSettings) -> dict[str, object]:
    """Digests of the files that settings name."""
    content: dict[str, object] = {}
    path, colon, _ = settings.scheduler.rpartition(":")
    if colon and path.endswith(".py"):
        content["policy"] = _policy_digest(Path(path).expanduser())
    for name, file in (("gpu", settings.gpu), ("profile", settings.profile)):
        if file and file.endswith(".json") and Path(file).is_file():
            content[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    content["workload"] = [_file_digest(file, file.stat().st_mtime_ns) for file in settings.workload.files()]
    return content


def _policy_digest(path: Path) -> str:
    """SHA-256 of a policy's file; of all its package's where it imports from there."""
    files = source_files(path)
    root = Path(os.path.commonpath([file.parent for file in files]))
    digests = {file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest() if len(files) > 1 else digests[path.name]


@lru_cache(maxsize=64)
def _file_digest(path: Path, modified: int) -> str:
    """SHA-256 of a file, read once while it is not changed."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@lru_cache(maxsize=1)
def code_version() -> str:
    """SHA-256 over the sources that can change a trial's result; analysis is not among them."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _CODE for path in ROOT.glob(pattern) if path.is_file()}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
