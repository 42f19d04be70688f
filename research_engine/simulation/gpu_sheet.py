"""What the roofline needs to know of a GPU: one JSON file each in gpus/, every number with its source beside it."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

SHEETS = Path(__file__).parent / "gpus"


@dataclass(frozen=True)
class GpuSheet:
    """A GPU in numbers.

    Args:
        name: as its driver calls it.
        memory_gib: device memory.
        memory_bandwidth: bytes a second, peak.
        flops: bf16 operations a second without sparsity, peak.
        memory_efficiency: share of the bandwidth that streaming kernels reach, in (0, 1].
        gemm_efficiency: (rows, share of the roofline that a linear layer of so many rows reaches); between points it
            is interpolated over the logarithm of the rows.
        attention_efficiency: share of `flops` that prefill attention reaches, in (0, 1].
        kernel_seconds: fixed time of one kernel.
        host_link_bandwidth: bytes a second between host and device, one way.
        host_copy_seconds: fixed time of each copy of a swapped block, of which there are two a layer (keys, values); 0
            where one kernel moves all blocks of a step, as this engine's does.
        gpu_link_bandwidth: bytes a second from one GPU of a host to its others, one way.
        gpu_link_seconds: fixed time of one all-reduce between GPUs of a host.
        host_seconds, host_seconds_per_sequence: what the host adds to every step that the device does not hide.
        sources: field or fields -> where the number is from, or that it is assumed.

    Raises:
        ValueError: a number is out of range, or a field has no source.
    """

    name: str
    memory_gib: float
    memory_bandwidth: float
    flops: float
    memory_efficiency: float
    gemm_efficiency: tuple[tuple[float, float], ...]
    attention_efficiency: float
    kernel_seconds: float
    host_link_bandwidth: float
    host_copy_seconds: float
    gpu_link_bandwidth: float
    gpu_link_seconds: float
    host_seconds: float
    host_seconds_per_sequence: float
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("memory_gib", "memory_bandwidth", "flops", "host_link_bandwidth", "gpu_link_bandwidth"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{self.name}: {name} = {getattr(self, name)!r}: must be a number > 0")
        for name in (
            "kernel_seconds", "host_copy_seconds", "gpu_link_seconds", "host_seconds", "host_seconds_per_sequence"
        ):  # fmt: skip
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{self.name}: {name} = {getattr(self, name)!r}: must be seconds >= 0")
        shares = [("gemm_efficiency", share) for _, share in self.gemm_efficiency]
        shares += [(name, getattr(self, name)) for name in ("memory_efficiency", "attention_efficiency")]
        for name, share in shares:
            if not 0 < share <= 1:
                raise ValueError(f"{self.name}: {name} holds {share!r}: must be a share > 0 and <= 1")
        rows = [at for at, _ in self.gemm_efficiency]
        if not rows or rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"{self.name}: gemm_efficiency has rows {rows}: they must rise, from 1 on")
        told = {word.strip() for names in self.sources for word in names.split(",")}
        untold = [entry.name for entry in fields(self) if entry.name not in (*told, "name", "sources")]
        if untold:
            raise ValueError(f"{self.name}: no source is given for {', '.join(untold)}")


def available_sheets() -> list[str]:
    """Names that `load_sheet` knows, sorted."""
    return sorted(path.stem for path in SHEETS.glob("*.json"))


def load_sheet(name: str) -> GpuSheet:
    """A sheet by name, or from a JSON file of one's own.

    Raises:
        ValueError: no such sheet, or a wrong or missing field; names the valid ones.
    """
    path = Path(name) if name.endswith(".json") else SHEETS / f"{name}.json"
    if not path.is_file():
        names = available_sheets()
        near = sorted(names, key=lambda valid: -difflib.SequenceMatcher(None, name.lower(), valid).ratio())
        raise ValueError(f"no GPU sheet {name!r}; there are {', '.join(near)}, or give the path of a .json file")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no GPU sheet: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} is no GPU sheet: it must hold a JSON object")
    valid = {entry.name for entry in fields(GpuSheet)}
    wrong, missing = sorted(set(raw) - valid), sorted(valid - set(raw))
    if wrong or missing:
        raise ValueError(f"{path}: unknown fields {wrong}, missing fields {missing}")
    try:
        raw["gemm_efficiency"] = tuple((float(rows), float(share)) for rows, share in raw["gemm_efficiency"])
        return GpuSheet(**raw)
    except TypeError as error:  # a text where a number should be
        raise ValueError(f"{path}: {error}") from error
