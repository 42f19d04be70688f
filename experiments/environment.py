"""What a run and each of its trials ran on and with: machine, versions, threads, the state of the repository."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from research_engine.other_load import usable_cores

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "torch",
    "numpy",
    "pandas",
    "pyarrow",
    "pydantic",
    "transformers",
    "tokenizers",
    "matplotlib",
    "gguf",
    "safetensors",
)


def environment() -> dict[str, Any]:
    """Of a run, as plain values for the environment.json in its directory."""
    own = trial_environment()
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {"date": own.pop("date"), "command": command, "gpus": _gpus()} | own


def trial_environment() -> dict[str, Any]:
    """Of a trial, as plain values for the environment.json in its directory; asked of the process that runs it.

    What can differ between two starts of a run, or between the nodes that it runs on. The GPU is not among it: a
    summary's `machine` names the one that the trial ran on.
    """
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        **_loaded(),
    }


@lru_cache(maxsize=1)
def _loaded() -> dict[str, Any]:
    """Versions and commit as they were when this process first asked: what it runs was loaded then."""
    return {"packages": {name: _version(name) for name in ("research_engine", *_PACKAGES)}, "git": _git()}


def machine_name(device: str) -> str:
    """Short, for a table: the GPU, or the CPU and its usable cores."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cores = usable_cores()
    return f"{cpu_name()}, {cores} core{'s' if cores != 1 else ''}"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].replace("(R)", "").replace("(TM)", "").split())
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")  # not imported for this alone
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any]:
    """Commit and whether the tree differs from it; None where there is no repository or no git."""

    def ask(*words: str) -> str | None:
        # a look at a repository must not write to it: status would, and leave its lock behind where the disk is full
        command = ["git", "--no-optional-locks", "-C", str(ROOT), *words]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    status = ask("status", "--porcelain")
    return {"commit": ask("rev-parse", "HEAD"), "dirty": None if status is None else bool(status)}
