"""`research-engine doctor`: what was built, what this machine has, and what to do about the rest."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

_FILE_WIDTH = 500  # where nothing has to fit: flags and paths stay on one line


def main() -> int:
    """Print what was built and what this machine has, and what to do about the rest. Exit code 1 without kernels."""
    import torch

    import research_engine
    from research_engine.executors.kv_sizing import free_host_memory
    from research_engine.kernels import build_info
    from research_engine.loading import cache_directory

    info = build_info()
    nvcc, driver = find_nvcc(), driver_version()
    problems = list(info["problems"])
    torch_cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    rows = {
        "research_engine": f"{research_engine.__version__} in {Path(research_engine.__file__).parent}",
        "Python": f"{platform.python_version()} ({sys.executable}), {platform.platform()}",
        "torch": f"{torch.__version__}, built for {torch_cuda}, {torch.get_num_threads()} threads",
        "extension": f"{info['file']} ({info['compiler']})" if info["built"] else "not built",
        "CPU flags": info["cpu_flags"],
        "OpenMP": f"{info['num_threads']} threads, {', '.join(info['openmp_runtimes']) or 'runtime unknown'}",
        "CUDA ops": f"for {', '.join(f'sm_{arch}' for arch in info['cuda_archs'])}, nvcc {info['nvcc_version']}"
        if info["built_with_cuda"]
        else "none: this is a CPU-only build",
        "CUDA flags": info["cuda_flags"],
        "nvcc now": nvcc or "not found (PATH, CUDA_HOME, /usr/local/cuda)",
        "driver": driver or "none",
        "GPUs": "; ".join(info["cuda_devices"]) or "none seen",
        "free memory": f"{free_host_memory() / 2**30:.1f} GiB",
        "downloads": str(cache_directory()),
    }
    if info["built"] and not info["built_with_cuda"] and nvcc:
        problems.append(
            f"nvcc is at {nvcc} now: `pip install -e .` builds the CUDA ops, unless RESEARCH_ENGINE_CUDA=0."
        )
    if driver and not torch.version.cuda:
        problems.append(f"There is a GPU (driver {driver}), but this torch has no CUDA: install a CUDA build of torch.")
    if driver and torch.version.cuda and not torch.cuda.is_available():
        problems.append(
            f"torch {torch.__version__} cannot use driver {driver}: update the driver or take an older torch."
        )
    if torch.cuda.is_available() and info["built_with_cuda"]:
        for i in range(torch.cuda.device_count()):
            name, capability = torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i)
            if (problem := arch_problem(capability, info["cuda_archs"], name)) is not None:
                problems.append(problem)
    console = Console() if sys.stdout.isatty() else Console(width=_FILE_WIDTH)
    table = Table(Column(), Column(overflow="fold"), show_header=False, box=None)  # paths are to be copied: whole
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    console.print(table)
    for problem in problems:
        console.print(f"- {problem}", highlight=False, markup=False, soft_wrap=True)
    if not problems:
        console.print("no problems found")
    return 0 if info["built"] else 1


def find_nvcc() -> str | None:
    """Where the build would find nvcc now, or None."""
    home = os.environ.get("CUDA_HOME")
    places = [os.environ.get("NVCC"), f"{home}/bin/nvcc" if home else None, "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((path for place in places if place and (path := shutil.which(place))), None)


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return found[0] if found else None


def arch_problem(capability: tuple[int, int], archs: list[str], name: str) -> str | None:
    """What is wrong when no code built for `archs` ("80", "90a") runs on a GPU of this capability, or None.

    A cubin with a letter runs on exactly its own capability. A plain one, or its PTX, runs there and on newer ones.
    """
    own = capability[0] * 10 + capability[1]
    plain = [int(arch) for arch in archs if arch.isdigit()]
    exact = [arch for arch in archs if arch.rstrip("af") == str(own)]
    if exact or any(arch <= own for arch in plain):
        return None
    return (
        f"{name} is sm_{own}, and the kernels were built for {', '.join(archs)} only: "
        f"set RESEARCH_ENGINE_CUDA_ARCHS={own} and run `pip install -e .`."
    )
