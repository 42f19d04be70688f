"""What was built, with which flags, and what it finds on this machine: the facts behind `research-engine doctor`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from research_engine.kernels._extension import _C, HOW_TO_BUILD, _Missing


def build_info() -> dict[str, Any]:
    """Facts about the extension; the keys below always are there.

    Returns:
        `built` (bool), `built_with_cuda` (bool), `file`, `compiler`, `cpu_flags`, `cuda_archs` (list), `nvcc_version`,
        `cuda_flags`, `num_threads` (of OpenMP), `openmp_runtimes` (files of the OpenMP runtimes in this process; more
        than one costs speed, since their threads fight for the cores), `cuda_devices` (descriptions, empty without a
        driver), `problems` (list of sentences, each with what to do).
    """
    info: dict[str, Any] = {
        "built": False,
        "built_with_cuda": False,
        "file": None,
        "compiler": "",
        "cpu_flags": "",
        "cuda_archs": [],
        "nvcc_version": "",
        "cuda_flags": "",
        "num_threads": 0,
        "openmp_runtimes": openmp_runtimes(),
        "cuda_devices": [],
        "problems": [],
    }
    if isinstance(_C, _Missing):
        info["problems"].append(f"The kernels are not built ({_C._reason}): {HOW_TO_BUILD}.")
        return info
    info.update(
        built=True,
        built_with_cuda=_C.built_with_cuda,
        file=_C.__file__,
        compiler=_C.compiler,
        cpu_flags=_C.cpu_flags,
        cuda_archs=[arch for arch in re.split(r"[;,\s]+", _C.cuda_archs) if arch],
        nvcc_version=_C.nvcc_version,
        cuda_flags=_C.cuda_flags,
        num_threads=_C.num_threads(),
    )
    if _C.built_with_cuda:
        info["cuda_devices"] = [_C.cuda_device_description(i) for i in range(_C.cuda_device_count())]
    else:
        info["problems"].append(
            "CPU-only build, since nvcc was not found when it was made: put nvcc on PATH or set CUDA_HOME, and run "
            "`pip install -e .`."
        )
    if len(info["openmp_runtimes"]) > 1:
        info["problems"].append(
            f"{len(info['openmp_runtimes'])} OpenMP runtimes are loaded, whose threads fight for the cores: "
            f"{', '.join(info['openmp_runtimes'])}."
        )
    return info


def openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes that this process has loaded; empty where /proc does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    files = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines() if "/" in line}
    return sorted(file for file in files if re.search(r"/lib(gomp|iomp5|omp)[.-]", file))
