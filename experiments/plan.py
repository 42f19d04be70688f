"""Which trials an experiment has, and the key of each: the hash of its settings, its seed and the code that runs it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from experiments.backend import model_identity
from experiments.config import Cell, Experiment, TrialSettings

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
    """One run of one cell with one seed."""

    cell: str
    levels: Mapping[str, str]
    settings: TrialSettings
    seed: int
    key: str

    @property
    def directory_name(self) -> str:
        """Readable and unique: what varied, the seed, the key's beginning."""
        words = re.sub(r"[^A-Za-z0-9._]+", "-", self.cell).strip("-")
        return f"{words}-seed{self.seed}-{self.key[:10]}"


def trials_of(experiment: Experiment, cells: Sequence[Cell]) -> list[Trial]:
    """Every cell with every seed. Models outermost, since loading one takes long; then seeds: an early end leaves whole
    comparisons.
    """
    trials = [
        Trial(cell.label, cell.levels, cell.settings, seed, trial_key(cell.settings, seed))
        for seed in experiment.seeds
        for cell in cells
    ]
    models = list(dict.fromkeys(model_identity(trial.settings) for trial in trials))
    return sorted(trials, key=lambda trial: models.index(model_identity(trial.settings)))


def trial_key(settings: TrialSettings, seed: int) -> str:
    """SHA-256 over the settings, the seed, the code, and the files that settings name (policy, GPU sheet, profile,
    traces).

    Raises:
        WorkloadError: a file of the workload is missing.
    """
    content: dict[str, object] = {"settings": settings.model_dump(mode="json"), "seed": seed, "code": code_version()}
    path, colon, _ = settings.scheduler.rpartition(":")
    if colon and path.endswith(".py"):
        content["policy"] = hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    for name, file in (("gpu", settings.gpu), ("profile", settings.profile)):
        if file and file.endswith(".json") and Path(file).is_file():
            content[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    content["workload"] = [_file_digest(file, file.stat().st_mtime_ns) for file in settings.workload.files()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
