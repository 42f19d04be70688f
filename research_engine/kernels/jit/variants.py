"""Variants of the attention kernels on tensor cores, compiled at first use: `path="decode[stages=3,warps=8]"`.

A variant is the built kernel's own source with other tile sizes, or a changed copy of its file in its place, and runs
through the same op: same checks, same launcher, same workspace.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from research_engine.kernels._extension import _C
from research_engine.kernels.jit.compilation import CSRC, CompiledKernel, compile
from research_engine.kernels.jit.launching import native_arch

_TYPES = {
    torch.bfloat16: "__nv_bfloat16",
    torch.float16: "__half",
    torch.float8_e4m3fn: "__nv_fp8_e4m3",
    torch.int8: "signed char",
}
Launch = tuple[int, int, int, int, int, int]  # as bindings.cpp takes it


@dataclass(frozen=True)
class Parameter:
    """A number of a kernel's source that may be changed.

    Attributes:
        macro: that the source reads it from.
        values: that it may have.
        meaning: in words.
    """

    macro: str
    values: tuple[int, ...]
    meaning: str


@dataclass(frozen=True)
class Family:
    """A kernel that has variants.

    Attributes:
        source: its file in csrc/cuda, which `source=` replaces.
        parameters: by name.
    """

    source: str
    parameters: Mapping[str, Parameter]


FAMILIES: dict[str, Family] = {
    "decode": Family(
        "paged_attention_decode_mma.cuh",
        {
            "stages": Parameter("RESEARCH_ENGINE_DECODE_STAGES", tuple(range(2, 9)), "of a warp's ring of copies"),
            "warps": Parameter("RESEARCH_ENGINE_DECODE_WARPS", (1, 2, 4, 8), "of a block, each takes 16 keys a step"),
            "blocks_per_sm": Parameter("RESEARCH_ENGINE_DECODE_BLOCKS_PER_SM", (1, 2, 3, 4), "blocks a multiprocessor"),
        },
    ),
    "prefill": Family(
        "paged_attention_prefill_wgmma.cu",
        {
            "keys": Parameter("RESEARCH_ENGINE_PREFILL_KEYS", (64, 128), "of a tile"),
            "slots": Parameter("RESEARCH_ENGINE_PREFILL_SLOTS", tuple(range(4, 17)), "tiles of the ring, at most"),
            "copiers": Parameter("RESEARCH_ENGINE_PREFILL_COPIERS", (1, 2), "warps that bring keys and values"),
        },
    ),
}


@dataclass(frozen=True)
class Variant:
    """A base path and what is changed of its kernel: numbers by parameter, and perhaps another source."""

    base: str
    numbers: tuple[tuple[str, int], ...]
    source: str | None = None

    @property
    def path(self) -> str:
        """As `paged_attention(path=...)` takes it."""
        parts = [f"source={self.source}"] if self.source is not None else []
        return f"{self.base}[{','.join([*parts, *(f'{name}={number}' for name, number in self.numbers)])}]"

    @property
    def version(self) -> int:
        """Changes when the source's file is written, so that an edit counts at the next call."""
        return 0 if self.source is None else Path(self.source).stat().st_mtime_ns

    @property
    def defines(self) -> dict[str, int]:
        """The macros that the source reads."""
        parameters = FAMILIES[self.base].parameters
        return {parameters[name].macro: number for name, number in self.numbers}


def is_variant(path: str) -> bool:
    """Whether a path names a variant, rightly or not."""
    return path.endswith("]")


def variant_of(base: str, settings: Mapping[str, int | str]) -> Variant:
    """The variant of a kernel with these settings: parameters of its family, and `source`, a file.

    Raises:
        ValueError: no such kernel, parameter or value; the message has the valid ones, nearest first.
    """
    if base not in FAMILIES:
        raise ValueError(f"path {base!r} has no variants; {_nearest(base, FAMILIES)}")
    parameters = FAMILIES[base].parameters
    numbers, source = {}, None
    for name, given in settings.items():
        if name == "source":
            source = str(given)
            if re.search(r"[,\[\]]", source):
                raise ValueError(f"source = {source!r}: a name without commas and brackets is needed")
            if not Path(source).is_file():
                raise ValueError(f"source = {source!r}: there is no such file")
            continue
        if name not in parameters:
            raise ValueError(f"variant of {base}: no parameter {name!r}; {_nearest(name, [*parameters, 'source'])}")
        valid = parameters[name].values
        text = str(given)
        number = int(text) if re.fullmatch(r"\d+", text) else None
        if number not in valid:
            order = sorted(valid, key=lambda value: abs(value - (number or 0)))
            raise ValueError(f"variant of {base}: {name} = {given!r}; one of {', '.join(map(str, order))}")
        numbers[name] = int(text)
    return Variant(base, tuple(sorted(numbers.items())), source)


@lru_cache(maxsize=1024)
def parse_path(path: str) -> Variant:
    """`decode[stages=3,warps=8]` in parts.

    Raises:
        ValueError: as `variant_of`, or not of this form.
    """
    match = re.fullmatch(r"(\w+)\[([^\[\]]*)\]", path)
    if match is None:
        raise ValueError(f"path = {path!r}: a variant is written like decode[stages=3,warps=8]")
    return variant_of(match.group(1), parse_settings(match.group(2)))


def parse_settings(text: str) -> dict[str, str]:
    """`stages=3,warps=8` in parts. Raises ValueError: not of this form, or a name twice."""
    settings: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name or not value:
            raise ValueError(f"variant {text!r}: {part!r} has to be NAME=VALUE, with commas between")
        if name in settings:
            raise ValueError(f"variant {text!r}: {name} is given twice")
        settings[name] = value
    return settings


def compile_variant(
    variant: Variant,
    *,
    cache_dtype: torch.dtype,
    head_size: int,
    group_size: int,
    scored: bool = False,
    arch: str,
) -> CompiledKernel:
    """The variant's kernel for one kind of problem; needs no GPU.

    Args:
        variant: what to compile.
        cache_dtype: bfloat16 or float16; decode also float8_e4m3fn and int8.
        head_size: at most 256; for decode a multiple of 16 (prefill is compiled for the next of 64, 128, 192, 256).
        group_size: query heads of a KV head.
        scored: prefill with softcap, ALiBi or a scale that is not positive.
        arch: sm_80 or later (decode), sm_90a (prefill).

    Raises:
        ValueError: a problem that the kernel is not made for, or numbers that do not fit together.
        ImportError: no compiler here.
        OSError: the variant's source cannot be read.
    """
    valid = [dtype for dtype in _TYPES if variant.base == "decode" or (dtype.is_floating_point and dtype.itemsize == 2)]
    if cache_dtype not in valid:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in valid)
        raise ValueError(f"{variant.path}: caches of {str(cache_dtype).removeprefix('torch.')}; it takes {names}")
    if not 0 < head_size <= 256 or (variant.base == "decode" and head_size % 16):
        raise ValueError(f"{variant.path}: head size {head_size}; at most 256, for decode a multiple of 16")
    if variant.base == "prefill" and arch != "sm_90a":
        raise ValueError(f"{variant.path}: {arch}; the prefill kernel's instructions are those of sm_90a")
    kind = _TYPES[cache_dtype]
    core = "research_engine::cuda::"
    if variant.base == "decode":
        space = f"{core}decode::"
        arguments = f"{kind}, {head_size}, {16 if group_size > 8 and head_size <= 128 else 8}"
        kernel, shape = f"{space}decode_mma_kernel<{arguments}>", f"{space}MmaShape<{arguments}>"
        constants = {
            "threads": f"{space}kThreads",
            "shared_bytes": f"{shape}::kSharedBytes",
            "blocks_per_sm": f"{shape}::kBlocksPerSm",
            "keys": f"{space}kTile * {space}kWarps",
            "parameter_bytes": f"sizeof({core}AfterPredecessor<{core}AttentionParams>)",
            "stages": f"{shape}::kStages",
        }
    else:
        size = -(-head_size // 64) * 64
        space = f"{core}prefill::"
        kernel = f"{core}prefill_wgmma_kernel<{kind}, {size}, {str(scored).lower()}>"
        shape = f"{space}WgmmaShape<{size}>"
        constants = {
            "threads": f"{shape}::kThreads",
            "shared_bytes": f"{space}shared_bytes<{size}>()",
            "blocks_per_sm": "1",
            "keys": f"{shape}::kKeys",
            "parameter_bytes": f"sizeof({space}PrefillParams)",
            "slots": f"{shape}::kSlots",
        }
    source = CSRC / "cuda" / FAMILIES[variant.base].source if variant.source is None else Path(variant.source)
    compiled = compile(
        source, kernel, arch=arch, defines=variant.defines, constants=constants, options=("-diag-suppress=177",)
    )
    for name, number in variant.numbers:
        if compiled.constants.get(name, number) < number:
            rule = f"shared memory holds {compiled.constants[name]} at head size {head_size}"
            raise ValueError(f"{variant.path}: {name} = {number}, and {rule}")
    return compiled


@lru_cache(maxsize=1024)
def launch_of(
    variant: Variant,
    version: int,
    device: int,
    cache_dtype: torch.dtype,
    head_size: int,
    group_size: int,
    scored: bool,
) -> Launch:
    """What the extension launches in place of the built kernel: compiled and loaded at the first call, then kept.

    Raises:
        ValueError, ImportError, OSError: as `compile_variant`, or more shared memory than the GPU has.
    """
    compiled = compile_variant(
        variant,
        cache_dtype=cache_dtype,
        head_size=head_size,
        group_size=group_size,
        scored=scored,
        arch=native_arch(device),
    )
    of = compiled.constants
    properties: Any = torch.cuda.get_device_properties(device)
    if of["shared_bytes"] > (most := properties.shared_memory_per_block_optin):
        raise ValueError(f"{variant.path}: {of['shared_bytes']} bytes of shared memory; this GPU has {most} a block")
    kernel = _C.load_kernel(compiled.cubin, compiled.symbol)
    return (kernel, of["threads"], of["shared_bytes"], of["blocks_per_sm"], of["keys"], of["parameter_bytes"])


def _nearest(wrong: str, valid: Iterable[str]) -> str:
    names = sorted(valid, key=lambda name: -difflib.SequenceMatcher(None, wrong, name).ratio())
    return f"valid ones, nearest first: {', '.join(names)}"
