"""Builds the extension research_engine._C with ninja: the CPU ops always, the CUDA ops where nvcc is found.

The metadata is in pyproject.toml. The build needs setuptools, pybind11 and ninja, never torch: tensors cross the
boundary as pointer, shape, strides and dtype. Objects stay in build/, so that a change of one source rebuilds that one
alone.

Environment: RESEARCH_ENGINE_CUDA=0 leaves the CUDA ops out, RESEARCH_ENGINE_CUDA=1 insists on them;
RESEARCH_ENGINE_CUDA_ARCHS ("80;90a") names their architectures; RESEARCH_ENGINE_CPU_ARCH ("native") is the compiler's
-march value; NVCC, CUDA_HOME and CXX name tools; MAX_JOBS limits parallel compilers.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
DEFAULT_CUDA_ARCHS = "80;90a"
GIB_PER_COMPILER = {"cpu": 1.0, "cuda": 2.5}


def find_nvcc() -> str | None:
    """The path of nvcc (of NVCC, CUDA_HOME, PATH or /usr/local/cuda, in this order), or None."""
    wanted = os.environ.get("RESEARCH_ENGINE_CUDA", "auto")
    if wanted not in ("0", "1", "auto"):
        raise SystemExit(f"RESEARCH_ENGINE_CUDA={wanted!r}: use 0 (CPU ops alone), 1 (CUDA ops or an error) or auto")
    if wanted == "0":
        return None
    candidates = [os.environ.get("NVCC")]
    candidates += [f"{home}/bin/nvcc" for home in (os.environ.get("CUDA_HOME"),) if home]
    candidates += [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for candidate in candidates:
        if candidate and (path := shutil.which(candidate)):
            return path
    if wanted == "1":
        raise SystemExit(
            "RESEARCH_ENGINE_CUDA=1, but no nvcc: put the CUDA toolkit's bin on PATH or set CUDA_HOME or NVCC"
        )
    return None


def gencode_flags(archs: str) -> list[str]:
    """One cubin an architecture, and the PTX of the highest plain one (no letter), which newer GPUs compile at load."""
    names = [name.strip().removeprefix("sm_").replace(".", "") for name in re.split(r"[;,\s]+", archs) if name.strip()]
    wrong = [name for name in names if not re.fullmatch(r"\d{2,3}[af]?", name)]
    if wrong or not names:
        raise SystemExit(f"RESEARCH_ENGINE_CUDA_ARCHS={archs!r}: expected names such as 80;90a, got {wrong or 'none'}")
    flags = [f"-gencode arch=compute_{name},code=sm_{name}" for name in names]
    plain = [int(name) for name in names if name.isdigit()]
    if plain:
        flags.append(f"-gencode arch=compute_{max(plain)},code=compute_{max(plain)}")
    return flags


def cuda_libraries(nvcc: str) -> list[str]:
    """Link flags for the static CUDA runtime; nvcc itself is asked where its libraries are."""
    dry_run = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull, "-c", "-o", os.devnull], capture_output=True, text=True, check=False
    ).stderr
    found = re.search(r"^#\$ LIBRARIES=(.*)$", dry_run, re.MULTILINE)
    folders = re.findall(r'-L"?([^"\s]+)', found.group(1)) if found else []
    home = Path(nvcc).resolve().parent.parent
    folders += [str(home / "lib64"), str(home / "lib")]
    usable = [str(Path(folder).resolve()) for folder in folders if (Path(folder) / "libcudart_static.a").exists()]
    if not usable:
        raise SystemExit(
            f"nvcc is at {nvcc}, but libcudart_static.a is in none of {folders}: "
            "install the static library of the CUDA runtime"
        )
    return [f"-L{usable[0]}", "-lcudart_static", "-lrt", "-lpthread", "-ldl"]


def cpu_arch_flags() -> list[str]:
    arch = os.environ.get("RESEARCH_ENGINE_CPU_ARCH", "native")
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return [f"-march={arch}" if x86 or arch != "native" else f"-mcpu={arch}"]


def parallel_jobs(cuda: bool) -> int:
    """Compilers at once: by cores, and by memory, since a compiler killed for want of it looks like a fault of ours."""
    if limit := os.environ.get("MAX_JOBS"):
        return max(1, int(limit))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = 4.0
    if hasattr(os, "sysconf"):
        memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(cores, int(memory_gib / GIB_PER_COMPILER["cuda" if cuda else "cpu"])))


def ninja_command() -> list[str]:
    try:
        import ninja

        return [str(Path(ninja.BIN_DIR) / "ninja")]
    except ImportError:
        found = shutil.which("ninja")
        if not found:
            raise SystemExit("ninja is missing: pip install ninja") from None
        return [found]


def write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def escape(path: Path | str) -> str:
    """A path as ninja reads it in a build line."""
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class NinjaBuildExtension(build_ext):
    """setuptools' build_ext, with ninja in the place of its compiler driver."""

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        cuda_sources = sorted((CSRC / "cuda").glob("*.cu")) if nvcc else []
        if nvcc is None:
            print(
                "research_engine: no nvcc, so this is a CPU-only build (CUDA_HOME, NVCC or PATH point to one)",
                flush=True,
            )
        cuda = bool(cuda_sources)

        folder = ROOT / "build" / f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}{'-cuda' if cuda else ''}"
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / "_C.so"
        self.write_build_info(folder, nvcc if cuda else None)
        write_if_changed(folder / "build.ninja", self.ninja_file(folder, library, nvcc if cuda else None, cuda_sources))

        command = [*ninja_command(), "-C", str(folder), "-j", str(parallel_jobs(cuda))]
        if self.verbose > 1:
            command.append("-v")
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("research_engine: the build failed; the compiler's message is above")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        # A new file in place of the old: overwriting a library that a running process has mapped would crash it.
        temporary = target.with_suffix(".tmp")
        shutil.copy2(library, temporary)
        os.replace(temporary, target)

    def compile_flags(self) -> tuple[list[str], list[str]]:
        common = ["-std=c++17", "-O3", f"-I{CSRC}", "-fPIC", "-fvisibility=hidden"]
        # No -ffast-math: infinities are the attention mask, and NaN has to come out where NaN went in.
        cpu = [
            *common,
            "-Wall",
            "-Wextra",
            "-fopenmp",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-ffp-contract=fast",
            *cpu_arch_flags(),
        ]
        host = ",".join(["-fPIC", "-fvisibility=hidden"])
        cuda = [
            "-std=c++17",
            "-O3",
            f"-I{CSRC}",
            "-lineinfo",
            "--expt-relaxed-constexpr",
            "-Xfatbin=-compress-all",
            f"-Xcompiler={host}",
        ]
        cuda += gencode_flags(os.environ.get("RESEARCH_ENGINE_CUDA_ARCHS") or DEFAULT_CUDA_ARCHS)
        return cpu, cuda

    def write_build_info(self, folder: Path, nvcc: str | None) -> None:
        """What `research-engine doctor` tells of the build, as a header that bindings.cpp includes."""
        cpu, cuda = self.compile_flags()
        release = ""
        if nvcc:
            output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
            release = match.group(1) if (match := re.search(r"release [\d.]+, V([\d.]+)", output)) else "unknown"
        archs = os.environ.get("RESEARCH_ENGINE_CUDA_ARCHS") or DEFAULT_CUDA_ARCHS
        lines = {
            "CUDA_ARCHS": archs if nvcc else "",
            "NVCC_VERSION": release,
            "CPU_FLAGS": " ".join(flag for flag in cpu if not flag.startswith("-I")),
            "CUDA_FLAGS": " ".join(flag for flag in cuda if not flag.startswith("-I")) if nvcc else "",
        }
        text = "// Written by setup.py.\n#pragma once\n"
        text += "".join(f'#define RESEARCH_ENGINE_{name} "{value}"\n' for name, value in lines.items())
        if nvcc:
            text += "#define RESEARCH_ENGINE_WITH_CUDA 1\n"
        write_if_changed(folder / "build_info.h", text)

    def ninja_file(self, folder: Path, library: Path, nvcc: str | None, cuda_sources: list[Path]) -> str:
        import pybind11

        cpu, cuda = self.compile_flags()
        python = [f"-I{folder}", f"-isystem {pybind11.get_include()}", f"-isystem {sysconfig.get_paths()['include']}"]
        link = ["-shared", "-fopenmp", *(cuda_libraries(nvcc) if nvcc else [])]
        lines = [
            f"cxx = {os.environ.get('CXX', 'g++')}",
            f"nvcc = {nvcc or 'nvcc'}",
            f"cpu_flags = {' '.join(cpu)}",
            f"cuda_flags = {' '.join(cuda)}",
            f"link_flags = {' '.join(link)}",
            "",
            "rule cxx",
            "  command = $cxx $cpu_flags $python_flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = C++ $in",
            "rule nvcc",
            "  command = $nvcc $cuda_flags -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = CUDA $in",
            "rule link",
            "  command = $cxx $in $link_flags -o $out",
            "  description = link $out",
            "",
        ]
        objects = []
        for source in [CSRC / "bindings.cpp", *sorted((CSRC / "cpu").glob("*.cpp")), *cuda_sources]:
            output = escape(folder / f"{source.parent.name}_{source.name}.o")
            rule = "nvcc" if source.suffix == ".cu" else "cxx"
            lines.append(f"build {output}: {rule} {escape(source)}")
            if source.name == "bindings.cpp":  # the only one that sees Python
                lines.append(f"  python_flags = {' '.join(python)}")
            objects.append(output)
        lines += [f"build {escape(library)}: link {' '.join(objects)}", f"default {escape(library)}", ""]
        return "\n".join(lines)


setup(
    # The sources are listed for source distributions; ninja takes what the folders hold.
    ext_modules=[Extension("research_engine._C", sources=["csrc/bindings.cpp"])],
    cmdclass={"build_ext": NinjaBuildExtension},
)
