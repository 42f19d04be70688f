"""Kernels from source at run time: compiled for one architecture, kept on disk by what they were compiled from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from research_engine.kernels.jit import nvrtc
from research_engine.kernels.jit.nvrtc import CompilationError

CSRC = Path(__file__).resolve().parents[3] / "csrc"

FORMAT = 1  # of the files in the cache, and of how sources are wrapped
_STANDARD = (
    "algorithm", "atomic", "cstddef", "cstdint", "cstdlib", "cstring", "map", "numeric", "stddef.h", "stdexcept",
    "stdint.h", "stdlib.h", "string", "tuple", "type_traits",
)  # fmt: skip
# A constant's value is read out of the name of this kernel, in which the compiler writes it: no GPU has to be asked.
_REPORT = "\ntemplate <long long kValue> __global__ void research_engine_jit_constant() {}\n"
_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, eq=False)
class CompiledKernel:
    """Machine code of one kernel; `research_engine.kernels.jit.load` makes it callable.

    Attributes:
        name: the name expression, such as `scale_rows<float>`.
        symbol: its name in the cubin.
        arch: that it runs on: sm_90a.
        cubin: the code.
        constants: values of the constant expressions that were asked for.
        registers: of a thread, and `spilled` bytes that did not fit them.
        log: the compiler's warnings.
    """

    name: str
    symbol: str
    arch: str
    cubin: bytes
    constants: Mapping[str, int]
    registers: int
    spilled: int
    log: str


def compile(
    source: str | Path,
    name: str,
    *,
    arch: str,
    defines: Mapping[str, int | str] | None = None,
    constants: Mapping[str, str] | None = None,
    include: Iterable[Path] = (),
    options: Sequence[str] = (),
) -> CompiledKernel:
    """Compile one kernel of a CUDA C++ source; the second time it comes from the cache, also in other processes.

    The project's headers can be included (`"cuda/mma.cuh"`), and so can CUDA's. Of the standard library there is what
    `csrc/common/standard_for_nvrtc.h` has. `__CUDACC_RTC__` is defined, to leave host code out; functions without a
    mark are the device's.

    Args:
        source: the text, or the path of a file, whose folder is searched for quoted includes.
        name: of the kernel, as the source would write it, namespace and template arguments included.
        arch: sm_80, sm_90a, ...; `native_arch` names a GPU's own.
        defines: macros, by name.
        constants: constant expressions of the source whose values are wanted, by the names they get in the result.
        include: further folders for includes, searched first.
        options: further options of NVRTC.

    Raises:
        CompilationError: the source is refused; the message has the line and the compiler's log.
        ValueError: an architecture that the compiler does not know.
        ImportError: no NVRTC on this machine.
        OSError: the file cannot be read, or the repository's sources are not there.
    """
    if not CSRC.is_dir():
        raise FileNotFoundError(f"{CSRC}: kernels are compiled against the repository's sources; pip install -e .")
    compiler = nvrtc.load()
    _check_arch(arch, compiler.architectures)
    defines, constants = dict(defines or {}), dict(constants or {})
    folders = [*map(Path, include), CSRC, CSRC / "cuda"]
    text, file = (
        (source.read_text(encoding="utf-8"), source) if isinstance(source, Path) else (source, Path("kernel.cu"))
    )
    names = [name, *(f"research_engine_jit_constant<(long long)({value})>" for value in constants.values())]
    flags = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "--ptxas-options=-v", *options]
    flags += [f"-D{macro}={value}" for macro, value in defines.items()]
    cuda = nvrtc.cuda_include()
    key = _key(text, file, folders, [compiler.version, _cuda_version(cuda), names, sorted(constants), flags])
    made = _from_cache(key)
    if made is None:
        search = [f"-I{folder}" for folder in (*folders, *((cuda,) if cuda else ()))]
        header = '#include "common/standard_for_nvrtc.h"\n'
        made = compiler.compile(text + _REPORT, str(file), [*flags, *search], names, dict.fromkeys(_STANDARD, header))
        _to_cache(key, made)
    used, spilled = _resources(made.log, made.lowered[name])
    values = {given: _value(made.lowered[wanted]) for given, wanted in zip(constants, names[1:], strict=True)}
    return CompiledKernel(name, made.lowered[name], arch, made.cubin, values, used, spilled, _warnings(made.log))


def cache_folder() -> Path:
    """Where compiled kernels stay: `jit` in RESEARCH_ENGINE_CACHE, or in ~/.cache/research_engine."""
    return Path(os.environ.get("RESEARCH_ENGINE_CACHE") or "~/.cache/research_engine").expanduser() / "jit"


def included_files(text: str, file: Path, folders: Sequence[Path]) -> dict[str, str]:
    """Sources that the text includes, directly or not, by path, as far as they lie beside it or in the folders.

    Conditions are not evaluated, so this may be more than the compiler reads, and never less, but for includes whose
    name is a macro.
    """
    found: dict[str, str] = {}
    left = [(text, file.parent)]
    while left:
        content, beside = left.pop()
        for mark, wanted in re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', content, re.MULTILINE):
            for folder in ((beside,) if mark == '"' else ()) + tuple(folders):
                path = (folder / wanted).resolve()
                if path.is_file():
                    if str(path) not in found:
                        found[str(path)] = path.read_text(encoding="utf-8")
                        left.append((found[str(path)], path.parent))
                    break
    return found


def _check_arch(arch: str, known: Sequence[int]) -> None:
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None or int(match.group(1)) not in known:
        wanted = int(match.group(1)) if match else 90
        nearest = sorted(known, key=lambda number: abs(number - wanted))
        names = ", ".join(f"sm_{number}" for number in nearest)
        raise ValueError(
            f"arch = {arch!r}: this compiler knows {names} (sm_90a and its like for what is special to one)"
        )


def _key(text: str, file: Path, folders: Sequence[Path], rest: object) -> str:
    """By content alone: a source that moves to another folder keeps its kernels."""
    standard = (CSRC / "common/standard_for_nvrtc.h").read_text(encoding="utf-8")
    sources = sorted(included_files(text, file, folders).values())
    content = json.dumps([FORMAT, text, standard, sources, rest])
    return hashlib.sha256(content.encode()).hexdigest()


def _cuda_version(include: Path | None) -> str:
    if include is None:
        return ""
    header = include / "cuda.h"
    found = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace")) if header.exists() else None
    return found.group(1) if found else str(include)


def _from_cache(key: str) -> nvrtc.Compiled | None:
    """A line of JSON, then the cubin; a file that is not whole counts as none."""
    try:
        head, _, cubin = (cache_folder() / key).read_bytes().partition(b"\n")
        facts = json.loads(head)
        whole = hashlib.sha256(cubin).hexdigest() == facts["sha256"]
        return nvrtc.Compiled(cubin, facts["lowered"], facts["log"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _to_cache(key: str, made: nvrtc.Compiled) -> None:
    """Whole or not at all; a cache that cannot be written costs time alone."""
    facts = {"sha256": hashlib.sha256(made.cubin).hexdigest(), "lowered": made.lowered, "log": made.log}
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{key}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(json.dumps(facts).encode() + b"\n" + made.cubin)
            os.replace(temporary, folder / key)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


def _value(symbol: str) -> int:
    found = re.search(r"ILx(n?)(\d+)E", symbol)
    if found is None:
        raise CompilationError(f"the compiler's name {symbol} holds no constant")
    return -int(found.group(2)) if found.group(1) else int(found.group(2))


def _resources(log: str, symbol: str) -> tuple[int, int]:
    """Registers and spilled bytes, from the assembler's lines about a kernel."""
    _, _, about = log.partition(f"Function properties for {symbol}\n")
    used, spilled = _USED.search(about), _SPILLED.search(about)
    return (int(used.group(1)) if used else 0), (max(map(int, spilled.groups())) if spilled else 0)


def _warnings(log: str) -> str:
    """The log without the assembler's report."""
    return "\n".join(line for line in log.splitlines() if not line.startswith(("ptxas info", "ptxas  "))).strip()
