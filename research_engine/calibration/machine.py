"""What a profile was measured on: names and versions of everything that its times depend on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

_KERNEL_SOURCES = Path(__file__).resolve().parents[2] / "csrc"


def machine_facts(device: str, dtype: str) -> dict[str, str]:
    """Names and versions, as `simulation.profiled.Profile.machine` stores them.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and cache, "bfloat16" for instance.

    Returns:
        `gpu` (on a CPU its name and the cores used), `dtype`, `tensor_parallel`, `research_engine`, `torch`, `kernels`
        (SHA-256 over the kernels' sources and their compiler, shortened), and on a GPU `driver` and `cuda`.
    """
    import torch

    from research_engine import __version__
    from research_engine.bench.cpu import cpu_name
    from research_engine.doctor import driver_version

    facts = {
        "dtype": dtype,
        "tensor_parallel": "1",
        "research_engine": __version__,
        "torch": torch.__version__,
        "kernels": kernels_version(),
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["driver"] = driver_version() or "unknown"
        facts["cuda"] = torch.version.cuda or "unknown"
    else:
        threads = torch.get_num_threads()
        facts["gpu"] = f"{cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"
    return facts


def kernels_version() -> str:
    """Short hash of the kernels' sources (where they are at hand) and of what built them."""
    from research_engine.kernels import build_info

    info = build_info()
    digest = hashlib.sha256(f"{info['compiler']} {info['nvcc_version']} {info['cuda_archs']}".encode())
    for path in sorted(_KERNEL_SOURCES.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(_KERNEL_SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def waits_for(device: str) -> Callable[[], None]:
    """A function that returns when the device has done all its work."""
    if not device.startswith("cuda"):
        return lambda: None
    import torch

    return lambda: torch.cuda.synchronize(device)
